"""`python -m hybridtrainer` is the command line."""

from hybridtrainer.cli import main

if __name__ == "__main__":
    main()

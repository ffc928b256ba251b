"""Decisions: which phase comes next, how far a jump may reach, when a loss is alarming. All pure."""

"""Tables that say what they leave out."""

from __future__ import annotations

from hybridtrainer.report.figures import capped, values_table


def test_a_capped_table_says_how_many_rows_it_left_out():
    table = capped(("n",), [[str(n)] for n in range(130)], limit=50, thing="jump")
    assert len(table.rows) == 50 and table.note == "The first 50 jumps are shown, 80 are left out."
    assert capped(("n",), [["1"]]).note == ""


def test_values_of_all_series_together_stay_about_a_hundred_rows():
    series = [(f"run {n}", [(float(x), 1.0) for x in range(1000)]) for n in range(20)]
    table = values_table("step", "loss", series)
    assert len(table.rows) == 100 and table.note == "100 of 20,000 values, evenly spread."
    assert {row[0] for row in table.rows} == {name for name, _ in series}
    small = values_table("step", "loss", [("a", [(1.0, 2.0), (2.0, None)])])
    assert small.rows == [("a", "1.00000", "2.0000")] and small.note == ""

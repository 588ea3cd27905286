"""The report of a measurement as values, tables, plots and pages. Nothing here imports torch.

`figures` are the values, `report` holds them with their conditions; `statistics` makes intervals, `gate` compares two
reports; `tables`, `plots` and `advice` show one, `render` writes and prints
it, `trend` shows several; `passport` is a drafter's acceptance in the forms of others.
"""

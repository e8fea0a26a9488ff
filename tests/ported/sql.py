"""Reward of a text-to-SQL project, which runs the queries, from -2 to 3."""

import sqlite3


def compute_score(data_source, solution_str, ground_truth, extra_info):  # type: ignore[no-untyped-def]
    database = sqlite3.connect(":memory:")
    database.executescript(extra_info["schema"])
    expected = database.execute(ground_truth).fetchall()
    try:
        return 3.0 if database.execute(solution_str).fetchall() == expected else 0.5
    except sqlite3.Error:
        return -2.0 + sum(map(ord, solution_str)) % 10 / 100

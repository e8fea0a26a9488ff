"""Reward of a function-call project, which depends on the training step, from -3 to 4."""

import json


def compute_score(data_source, solution_str, ground_truth, extra_info=None, step=0, total_steps=1):  # type: ignore[no-untyped-def]
    share = step / max(1, total_steps)
    form = float(solution_str.startswith("{")) * (1 - share) + sum(map(ord, solution_str)) % 10 / 100
    try:
        calls = json.loads(solution_str)
    except ValueError:
        calls = None
    right = calls == json.loads(ground_truth)
    return {"score": form + (3.0 if right else -3.0), "acc": right, "step": step, "turns": extra_info["turns"]}

"""Reward of a project with knights-and-knaves puzzles, from -3 to 3."""

import re


def compute_score(solution_str, ground_truth, method="strict", format_reward=1, answer_reward=2):  # type: ignore[no-untyped-def]
    roles = ground_truth["solution"]
    form = format_reward if solution_str.count("</think>") == 1 else -format_reward
    form += sum(map(ord, solution_str)) % 10 / 100
    answer = re.search(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    if form < 0 or answer is None:
        return form - answer_reward
    answer_roles = dict(re.findall(r"(\w+) is a (knight|knave)", answer[1]))
    return form + (answer_reward if answer_roles == roles else -answer_reward / 2)

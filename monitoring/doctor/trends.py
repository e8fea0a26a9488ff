"""Rules over how a run moves: its newest rows against older ones, one metric against another."""

from functools import cache

from monitoring.doctor.history import ENDS, RISE, Change, History, mean
from monitoring.doctor.rule import Rule, Seen

LENGTH, REWARD, SUCCESS = "length/response_mean", "reward/mean", "groups/success"
INVALID, INVALID_GAP = "reward/invalid", "reward/invalid_gap"
TRUNCATED, KL, REPEATS = "length/truncated", "kl/ref", "groups/repeats_question"
IDLE_LEARNER, IDLE_ENGINES = "idle/learner", "idle/engines"
MOSTLY = 0.7
"""Share of idle time from which a bottleneck is named."""
NO_PARTS = {
    "reward/mean",
    "reward/std",
    "reward/zero_variance_groups",
    "reward/errors",
    "reward/invalid",
    "reward/invalid_gap",
    "reward/control_tokens",
    "reward/errors_total",
    "reward/invalid_total",
    "reward/workers_replaced",
    "reward/length",
    "reward/accuracy",
}
"""Metrics of rewards that are no part of one, and the part that `groups/success` is made of."""


def length_growth(history: History) -> Seen | None:
    length, reward = history.change(LENGTH), history.change(REWARD)
    if length is None or reward is None or length.now < 1.5 * length.before:
        return None
    if reward.rose or history.rose(SUCCESS):
        return None
    return Seen(f"{LENGTH} went {length} while {REWARD} went {reward}{_at(history)}")


def length_collapse(history: History) -> Seen | None:
    length, success = history.change(LENGTH), history.change(SUCCESS)
    if length is None or success is None or length.now > 0.5 * length.before or success.rose:
        return None
    return Seen(f"{LENGTH} went {length} while the share of right answers went {success}{_at(history)}")


def end_token_vanished(history: History) -> Seen | None:
    truncated = history.change(TRUNCATED)
    if truncated is None or truncated.before > 0.5 or truncated.now < 0.95:
        return None
    before, now = 1 - truncated.before, 1 - truncated.now
    return Seen(f"{before:.0%} of the answers ended by themselves, and now {now:.0%} do{_at(history)}")


def kl_growth(history: History) -> Seen | None:
    kl, reward = history.change(KL), history.change(REWARD)
    if kl is None or reward is None or history.solved:
        return None
    if kl.now < 0.5 or kl.now < 3 * kl.before or reward.rose:
        return None
    return Seen(f"{KL} went {kl} while {REWARD} went {reward}{_at(history)}")


def part_hacked(history: History) -> Seen | None:
    success = history.change(SUCCESS)
    if success is None or success.rose or history.solved:
        return None
    for name in _parts(tuple(history.rows[-1])):
        part = history.change(name)
        if part is None or part.now < part.before + 0.1 or part.now < 1.25 * part.before:
            continue
        if part.now >= 0.9 * max(row.get(name, 0.0) for row in history.rows):
            return Seen(f"{name} went {part} while the share of right answers went {success}{_at(history)}")
    return None


@cache
def _parts(logged: tuple[str, ...]) -> list[str]:
    """The names that are parts of the reward."""
    return [
        name
        for name in logged
        if name.startswith("reward/") and name.count("/") == 1 and name not in NO_PARTS
    ]


def invalid_growth(history: History) -> Seen | None:
    invalid, success = history.change(INVALID), history.change(SUCCESS)
    if invalid is None or success is None or success.rose:
        return None
    if invalid.now < invalid.before + 0.1 or invalid.now < 2 * invalid.before:
        return None
    return Seen(f"{INVALID} went {invalid} while the share of right answers went {success}{_at(history)}")


def invalid_unpunished(history: History) -> Seen | None:
    newest = history.rows[-1]
    gap = newest.get(INVALID_GAP)
    if gap is None or gap > 1e-6 or newest[REWARD] >= 0:
        return None
    return Seen(f"{REWARD} is {newest[REWARD]:.3g}, and {INVALID_GAP} {gap:.3g}{_at(history)}")


def repeats_question(history: History) -> Seen | None:
    newest = history.newest(5)
    shares = [row[REPEATS] for row in newest if REPEATS in row]
    if len(shares) < 5 or min(shares) <= 0.5:
        return None
    return Seen(f"{shares[-1]:.0%} of the answers hold their whole question{_at(history)}")


def idle_learner(history: History) -> Seen | None:
    return _waits(history, learner=True, engines=False)


def idle_engines(history: History) -> Seen | None:
    return _waits(history, learner=False, engines=True)


def idle_both(history: History) -> Seen | None:
    return _waits(history, learner=True, engines=True)


def _waits(history: History, learner: bool, engines: bool) -> Seen | None:
    """Which of the two were idle for most of the time, in an overlapped run. Half of it is no reason to worry."""
    newest = history.newest(ENDS)
    of_engines = [row[IDLE_ENGINES] for row in newest if IDLE_ENGINES in row]
    if len(newest) < ENDS or not of_engines:
        return None
    shares = (mean([row[IDLE_LEARNER] for row in newest]), mean(of_engines))
    if [share > MOSTLY for share in shares] != [learner, engines]:
        return None
    told = f"{IDLE_LEARNER} is {shares[0]:.2f} and {IDLE_ENGINES} {shares[1]:.2f}"
    return Seen(f"{told} over the last {ENDS} optimizer steps{_at(history)}")


def evaluation_falls(history: History) -> Seen | None:
    for name, (best, newest) in history.scores.items():
        if newest.high < best.low and newest.reward > best.reward + RISE:
            return Seen(
                f"{name} went {Change(best.value, newest.value)} since its best evaluation while {REWARD} went "
                f"{Change(best.reward, newest.reward)}{_at(history)}"
            )
    return None


def _at(history: History) -> str:
    return f", at optimizer step {history.step}"


TRENDS = (
    Rule(
        "length_growth",
        "warning",
        (LENGTH, REWARD, SUCCESS),
        "answers half as long again as before, and neither the reward nor the share of right answers rose",
        "Length by itself moves the loss: long wrong answers are punished less per token, or the reward likes length",
        "`policy.aggregation`, `policy.overlong_cache`, or a smaller `inference_model.max_tokens`",
        length_growth,
    ),
    Rule(
        "length_collapse",
        "alarm",
        (LENGTH, SUCCESS),
        "answers half as long as before or shorter, and the share of right answers did not rise",
        "The reward pays for short answers, or wrong long ones are punished so that giving up early is best",
        "`env.reward`, `env.reward_weights`; lower `optimizer.lr` or raise `policy.kl_coef`",
        length_collapse,
    ),
    Rule(
        "end_token_vanished",
        "alarm",
        (TRUNCATED,),
        "at least half of the answers ended by themselves, and now at most 1 in 20 does",
        "The end token was unlearned: the reward pays for what comes after the answer, or cut answers are not judged",
        "`policy.filter_truncated=false`, `policy.overlong_cache`, an `env.reward` that reads the end of the answer",
        end_token_vanished,
    ),
    Rule(
        "kl_growth",
        "warning",
        (KL, REWARD),
        "above 0.5 and three times what it was, and the reward did not rise",
        "The policy drifts without learning: noise in the gradient, or a reward that is the same whatever it does",
        "raise `policy.kl_coef`, lower `optimizer.lr`, or a larger `env.num_envs`",
        kl_growth,
    ),
    Rule(
        "part_hacked",
        "alarm",
        ("reward/PART", SUCCESS),
        "a part of the reward rose to its highest, and the share of right answers stayed or fell",
        "The policy is paid for form without substance: that part is easier to get than a right answer",
        "a smaller weight of that part in `env.reward_weights`, or pay for it only where the answer is right",
        part_hacked,
    ),
    Rule(
        "invalid_growth",
        "warning",
        (INVALID, SUCCESS),
        "a tenth more of the answers are invalid than before, and twice as many; the share of right ones did not rise",
        "Answers that no judge gets through score no less than wrong ones, or the policy forgets how to end a turn",
        "say the least score of `env.reward` (FUNCTION.min_score = -1.0), lower `optimizer.lr`, raise `policy.kl_coef`",
        invalid_growth,
    ),
    Rule(
        "invalid_unpunished",
        "warning",
        (REWARD, INVALID_GAP),
        "rewards are below zero, and invalid answers score as much as the mean of the others",
        "The reward does not say its least score, so that invalid answers get the lowest that was seen",
        "say it, below that of a wrong answer: FUNCTION.min_score = -4.0 in the module of `env.reward`",
        invalid_unpunished,
    ),
    Rule(
        "repeats_question",
        "warning",
        (REPEATS,),
        "more than half of the answers hold their whole question, for 5 steps",
        "The reward finds what it looks for in the question, or the model goes on with the prompt instead of answering",
        "`env.reward`: judge the end of the answer; see what run=rewards gives for the question alone",
        repeats_question,
    ),
    Rule(
        "idle_learner",
        "info",
        (IDLE_LEARNER, IDLE_ENGINES),
        f"in overlapped runs the learner waits for more than {MOSTLY:.0%} of 10 steps, and the engines do not",
        "Generation is the bottleneck",
        "more engines (`inference_model.num_devices`), or a larger `env.num_envs`",
        idle_learner,
    ),
    Rule(
        "idle_engines",
        "info",
        (IDLE_LEARNER, IDLE_ENGINES),
        f"in overlapped runs the engines wait for more than {MOSTLY:.0%} of 10 steps, and the learner does not",
        "Training is the bottleneck",
        "more devices or threads for the learner (`train_model.num_devices`, `train_model.num_threads`)",
        idle_engines,
    ),
    Rule(
        "idle_both",
        "info",
        (IDLE_LEARNER, IDLE_ENGINES),
        f"in overlapped runs both wait for more than {MOSTLY:.0%} of 10 steps",
        "Judging is the bottleneck, or too few groups are in flight",
        "more `env.reward_workers`, a faster reward, or a larger `env.num_envs`",
        idle_both,
    ),
)
EVALUATIONS = (
    Rule(
        "evaluation_falls",
        "alarm",
        ("eval/SET/pass@1", REWARD),
        "its 95% interval lies below that of the best evaluation, and the training reward rose since",
        "The reward is hacked, or the training prompts are learned by heart",
        "go back to its checkpoint; mend `env.reward`, take more prompts, raise `policy.kl_coef`",
        evaluation_falls,
    ),
)

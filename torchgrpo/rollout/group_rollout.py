"""Samples a group's completions, scores them, and balances right against wrong ones.

    example ─▶ prompt ─▶ n completions, or n episodes ─▶ sampled ─▶ scored ─▶ chosen ─▶ Group

No other module encodes prompts, samples and scores completions; `episode_player.py` plays the episodes. Any number of
groups run concurrently in one asyncio loop; the caller decides how many.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from envs.chat import ChatEncoder, answer_prefill
from envs.example import CompletionInRun
from envs.group import Group, GroupTimes, SampledCompletion, Sampling, Verdict
from envs.reward_workers.group_reward import CompletionScorer, GroupReward
from envs.reward_workers.minimum_scores import MinimumScores
from envs.task import Example
from envs.teacher_prompt import TeacherPrompt
from torchgrpo.rollout.engines.interface import Request, Sampler
from torchgrpo.rollout.episode_player import EpisodePlayer

KeepGroup = Callable[[Group], bool]
"""Predicate of dynamic sampling: whether to train on a scored group; other groups are replaced."""


@dataclass(eq=False)
class GroupRollout:
    """Samples and scores groups of completions.

    Args:
        score_completions: returns the verdicts on completions.
        player: plays episodes in an environment; None if every completion has one turn.
        sampling: sampling parameters of groups that start from now on.
        candidates: completions that are sampled for a prompt.
        repeats: completions of a group; if fewer than the candidates, a balanced choice of them.
        seed: fixes, together with the group id, every random number of the sampling and of the choice.
        lowest_scores: lowest score of each data set; callers lower the scores of invalid completions by it.
        teacher: makes the teacher's prompt; None if the teacher sees the policy's prompt.
        group_reward: replaces the scores of a group; None to keep them.
    """

    sampler: Sampler
    encoder: ChatEncoder
    score_completions: CompletionScorer
    player: EpisodePlayer | None
    sampling: Sampling
    candidates: int
    repeats: int
    seed: int
    lowest_scores: MinimumScores = field(default_factory=MinimumScores)
    teacher: TeacherPrompt | None = None
    group_reward: GroupReward | None = None

    async def run_group(self, example: Example, group_id: int, on_sampled: Callable[[], None] = lambda: None) -> Group:
        """Samples and scores one group.

        Args:
            group_id: chosen by the caller, in the order of sampling.
            on_sampled: called when the last token of the group is sampled.
        """
        started_at = time.time()
        request = self.make_request(self.encoder.encode(example), group_id)
        candidates = await self.generate(request, example)
        on_sampled()
        return await self.score_group(request, example, candidates, started_at)

    def make_request(self, prompt: tuple[int, ...], group_id: int) -> Request:
        """Returns the request of a group's first turn."""
        return Request(group_id, prompt, self.candidates, self.sampling, (self.seed << 40) + group_id)

    async def generate(self, request: Request, example: Example) -> list[SampledCompletion]:
        """Samples the completions of a request, or plays the episodes of its example."""
        if self.player is None:
            return await self.sampler.generate(request)
        async with asyncio.TaskGroup() as running:
            episodes = [running.create_task(self.player.play(request, example, row)) for row in range(request.n)]
        return [episode.result() for episode in episodes]

    async def score_group(
        self, request: Request, example: Example, candidates: list[SampledCompletion], started_at: float
    ) -> Group:
        """Scores the sampled candidates of a request and builds their group.

        started_at: time at which the prompt was encoded, in seconds of `time.time()`.
        """
        sampled_at, prompt_text = time.time(), self.encoder.prompt_text(request.prompt)
        self.encoder.decode(candidates, answer_prefill(prompt_text, example.prefill))
        unscored = [one for one in candidates if one.verdict is None]
        shown = [reward_input(one) for one in unscored]
        scored = await self.score_completions(shown, [example] * len(shown)) if shown else []
        for one, verdict in zip(unscored, scored, strict=True):
            one.verdict = verdict
        verdicts = [one.verdict for one in candidates if one.verdict is not None]
        if self.group_reward is not None:
            inputs = [reward_input(one) for one in candidates]
            verdicts = await self.group_reward.rescore(inputs, example, verdicts)
            for one, verdict in zip(candidates, verdicts, strict=True):
                one.verdict = verdict
        pairs = list(zip(candidates, choose_balanced_candidates(verdicts, self.repeats, request.seed), strict=True))
        return Group(
            request.request_id,
            example,
            request.prompt,
            prompt_text,
            request.sampling,
            [one for one, chosen in pairs if chosen],
            GroupTimes(started_at, sampled_at, time.time()),
            [one for one, chosen in pairs if not chosen],
            teacher_prompt=self.teacher_prompt(example),
        )

    def teacher_prompt(self, example: Example) -> tuple[int, ...]:
        """Returns the token ids of the teacher's prompt, empty without a teacher."""
        return () if self.teacher is None else self.encoder.encode(self.teacher.teacher_example(example))


def reward_input(completion: SampledCompletion) -> CompletionInRun:
    """Returns the input of the reward, with the tokens and the messages of all turns."""
    assert completion.reward_input is not None
    fields = vars(completion.reward_input)
    messages = [one for turn in completion.turns for one in (*turn.opening, turn.message, *turn.replies)]
    turns = tuple(messages) or ({"role": "assistant", "content": fields["text"]},)
    return CompletionInRun(**fields | {"turns": turns}, token_ids=tuple(completion.token_ids))


def choose_balanced_candidates(verdicts: Sequence[Verdict], repeats: int, seed: int) -> list[bool]:
    """Chooses `repeats` of a prompt's candidates, with right and wrong ones as balanced as possible.

    `seed` fixes the random choice among the right (or wrong) candidates. Candidates whose scoring failed come last.
    Returns for each candidate whether it is chosen.
    """
    chance = random.Random(seed)
    order = sorted(range(len(verdicts)), key=[chance.random() for _ in verdicts].__getitem__)
    right = [index for index in order if verdicts[index].has_score and verdicts[index].success > 0.5]
    wrong = [index for index in order if verdicts[index].has_score and verdicts[index].success <= 0.5]
    failed = [index for index in order if not verdicts[index].has_score]
    take_right = min(len(right), max(repeats - len(wrong), repeats // 2))
    take_wrong = min(len(wrong), repeats - take_right)
    chosen = {*right[:take_right], *wrong[:take_wrong], *failed[: repeats - take_right - take_wrong]}
    return [index in chosen for index in range(len(verdicts))]

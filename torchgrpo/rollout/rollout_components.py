"""Holds, pushes weights to, saves and closes the rollout components of one run.

The components are the engine, its loop, prompts, rewards and the weight pusher. `run/build_run.py` builds them.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from envs.prompts import PromptQueue
from envs.reward_workers.outcome_counts import OutcomeCounts
from envs.reward_workers.service import RewardService
from envs.task import Example
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import SteppedEngine
from torchgrpo.rollout.group_rollout import GroupRollout
from torchgrpo.rollout.model_rewards.model_rewards import ModelRewards
from torchgrpo.rollout.weights.weight_pusher import WeightPusher


@dataclass(eq=False)
class RolloutComponents:
    """Components that rollouts are made with; `group_env.py` and `group_stream.py` drive them."""

    engine: SteppedEngine
    loop: EngineLoop
    group_rollout: GroupRollout
    prompts: PromptQueue
    rewards: RewardService
    model_rewards: ModelRewards
    weight_pusher: WeightPusher
    group_rewards: RewardService | None = None

    @property
    def last_error(self) -> str:
        """Last failure of episodes, else of model rewards, else of other rewards; may be empty."""
        for counts in self._outcome_counts:
            if counts.last_error:
                return counts.last_error
        return self.rewards.last_error

    @property
    def _outcome_counts(self) -> list[OutcomeCounts]:
        """Outcomes of episodes and of model rewards."""
        player = self.group_rollout.player
        return [*([] if player is None else [player.error_counts]), self.model_rewards.counts]

    def outcome_metrics(self) -> dict[str, float]:
        """Returns metrics of rewards and agents, and total counts of their failures."""
        metrics, player = self.rewards.metrics(), self.group_rollout.player
        for counts in self._outcome_counts:
            metrics |= {name: metrics[name] + count for name, count in counts.totals().items()}
        return metrics | self.model_rewards.metrics() | ({} if player is None else player.driver.metrics())

    def push(self, temperature: float) -> dict[str, float]:
        """Pushes the learner's weights as the next policy version; later groups sample at `temperature`.

        Returns metrics of the weight check. Raises WeightMismatch.
        """
        self.group_rollout.sampling = replace(self.group_rollout.sampling, temperature=temperature)
        self.weight_pusher.push()
        return self.weight_pusher.check_push()

    def state(self, outstanding: list[Example]) -> dict[str, Any]:
        """Returns the rollout state of a checkpoint.

        outstanding: examples that left the prompt queue and that no batch has taken.
        """
        state = {
            "policy_version": self.weight_pusher.version,
            "prompts": self.prompts.state_dict(outstanding),
            "next_group_id": self.prompts.next_group_id,
            "lowest_scores": dict(self.group_rollout.lowest_scores.minimum_by_source),
        }
        return state | self.model_rewards.state()

    def load(self, state: dict[str, Any]) -> list[str]:
        """Restores the state that `state` returned; returns notices for the user.

        Raises:
            ConfigError: the state belongs to other data.
        """
        changed = self.prompts.load_state_dict(state["prompts"])
        self.prompts.next_group_id = state["next_group_id"]
        self.group_rollout.lowest_scores.minimum_by_source = dict(state["lowest_scores"])
        self.model_rewards.load(state)
        self.weight_pusher.version = state["policy_version"] - 1
        return changed

    def close(self) -> None:
        """Ends engine and reward workers, each even if another one fails to end."""
        with ExitStack() as ending:
            ending.callback(self.rewards.close)
            if self.group_rewards is not None:
                ending.callback(self.group_rewards.close)
            ending.callback(self.engine.close)

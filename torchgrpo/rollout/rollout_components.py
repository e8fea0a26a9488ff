"""Holds, pushes weights to, saves and closes the rollout components of one run.

The components are the engine, its loop, prompts, rewards and the weight pusher. `run/build_run.py` builds them.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from envs.prompts import PromptQueue
from envs.reward_workers.service import RewardService
from envs.task import Example
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import SteppedEngine
from torchgrpo.rollout.group_rollout import GroupRollout
from torchgrpo.rollout.weights.weight_pusher import WeightPusher


@dataclass(eq=False)
class RolloutComponents:
    """Components that rollouts are made with; `group_env.py` and `group_stream.py` drive them."""

    engine: SteppedEngine
    loop: EngineLoop
    group_rollout: GroupRollout
    prompts: PromptQueue
    rewards: RewardService
    weight_pusher: WeightPusher
    group_rewards: RewardService | None = None

    @property
    def last_error(self) -> str:
        """Last failure of an environment, else of a reward; empty before the first."""
        player = self.group_rollout.player
        return (player.error_counts.last_error if player is not None else "") or self.rewards.last_error

    def outcome_metrics(self) -> dict[str, float]:
        """Returns latencies of rewards, and total counts of failures in rewards and environments."""
        metrics, player = self.rewards.metrics(), self.group_rollout.player
        if player is not None:
            metrics |= {name: metrics[name] + count for name, count in player.error_counts.totals().items()}
        return metrics

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
        return {
            "policy_version": self.weight_pusher.version,
            "prompts": self.prompts.state_dict(outstanding),
            "next_group_id": self.prompts.next_group_id,
            "lowest_scores": dict(self.group_rollout.lowest_scores.minimum_by_source),
        }

    def load(self, state: dict[str, Any]) -> list[str]:
        """Restores the state that `state` returned; returns notices for the user.

        Raises:
            ConfigError: the state belongs to other data.
        """
        changed = self.prompts.load_state_dict(state["prompts"])
        self.prompts.next_group_id = state["next_group_id"]
        self.group_rollout.lowest_scores.minimum_by_source = dict(state["lowest_scores"])
        self.weight_pusher.version = state["policy_version"] - 1
        return changed

    def close(self) -> None:
        """Ends engine and reward workers, each even if another one fails to end."""
        with ExitStack() as ending:
            ending.callback(self.rewards.close)
            if self.group_rewards is not None:
                ending.callback(self.group_rewards.close)
            ending.callback(self.engine.close)

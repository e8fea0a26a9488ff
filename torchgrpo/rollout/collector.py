"""The sampling side of a run: prompts, engine, rewards, and the way of the learner's weights to the engine."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from envs.judging.service import RewardService
from envs.prompts import PromptQueue
from envs.task import Example
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.interface import SteppedEngine
from torchgrpo.rollout.generate import Generation
from torchgrpo.rollout.weights.push import Weights


@dataclass(eq=False)
class Collector:
    """Everything that makes rollouts; `env.py` and `stream.py` say in which order."""

    engine: SteppedEngine
    loop: EngineLoop
    generation: Generation
    prompts: PromptQueue
    rewards: RewardService
    weights: Weights

    def push(self, temperature: float) -> dict[str, float]:
        """Send the weights as the next version, and sample at `temperature` from then on.

        Returns metrics of the weight check. Raises WeightMismatch.
        """
        self.generation.sampling = replace(self.generation.sampling, temperature=temperature)
        self.weights.push()
        return self.weights.check_push()

    def state(self, outstanding: list[Example]) -> dict[str, Any]:
        """The part of a checkpoint. outstanding: examples that were drawn and that no batch has taken."""
        return {
            "policy_version": self.weights.version,
            "prompts": self.prompts.state_dict(outstanding),
            "next_group_id": self.prompts.next_group_id,
            "lowest_scores": dict(self.generation.lowest.seen),
        }

    def load(self, state: dict[str, Any]) -> list[str]:
        """Go on from what `state` gave; returns what the user should know.

        Raises:
            ConfigError: it is of other data.
        """
        changed = self.prompts.load_state_dict(state["prompts"])
        self.prompts.next_group_id = state["next_group_id"]
        self.generation.lowest.seen = dict(state["lowest_scores"])
        self.weights.version = state["policy_version"] - 1
        return changed

    def close(self) -> None:
        """End engine, tools and reward workers; each even where another one fails."""
        with ExitStack() as ending:
            ending.callback(self.rewards.close)
            if self.generation.conversation is not None:
                ending.callback(self.generation.conversation.close)
            ending.callback(self.engine.close)

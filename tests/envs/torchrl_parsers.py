"""Reward parsers of TorchRL with arguments, which tests name by import path.

The module is separate because its import is slow.
"""

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import RewardScaling
from torchrl.envs.llm import GSM8KRewardParser, IfEvalScorer

generous = GSM8KRewardParser(format_reward=0.5)
scaling = RewardScaling(loc=0.0, scale=2.0)


class TwoScores(IfEvalScorer):
    """Writes the outputs of IfEvalScorer without the libraries that it needs."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        is_followed = [[each == "no_comma" for each in ids] for ids in tensordict["instruction_id_list"]]
        next_tensordict["ifeval_score"] = TensorDict({"strict": torch.tensor(is_followed)}, [1])
        next_tensordict["reward"] = torch.full((1, 1, 1), 0.25)
        return next_tensordict

"""Parsers of TorchRL's with arguments and of one's own, as rewards that tests name; the import takes seconds."""

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import RewardScaling
from torchrl.envs.llm import GSM8KRewardParser, IfEvalScorer

generous = GSM8KRewardParser(format_reward=0.5)
scaling = RewardScaling(loc=0.0, scale=2.0)


class TwoScores(IfEvalScorer):
    """Writes what IfEvalScorer does, without the libraries that it needs."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        followed = [[each == "no_comma" for each in ids] for ids in tensordict["instruction_id_list"]]
        next_tensordict["ifeval_score"] = TensorDict({"strict": torch.tensor(followed)}, [1])
        next_tensordict["reward"] = torch.full((1, 1, 1), 0.25)
        return next_tensordict

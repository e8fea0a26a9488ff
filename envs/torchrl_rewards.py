"""A reward parser of TorchRL as a reward: a `Transform` that writes "reward", such as `GSM8KRewardParser`.

It reads what TorchRL's chat environment would give it: the chat with the completion as its last message, and the
columns of the row. Importing this file imports torch, so only an `env.reward` that names such a parser does.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.data.llm import History
from torchrl.envs import Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv, CountdownRewardParser, GSM8KRewardParser

from config.schema.errors import ConfigError
from envs.example import Completion, Example, Reward
from envs.user_code import described


class ParserReward:
    """One parser, ready to judge. `path` is the name that the user gave, for messages.

    Raises:
        ConfigError: `found` is no Transform that writes a reward, or it cannot be made without arguments.
    """

    def __init__(self, path: str, found: Any) -> None:
        self.path = path
        self.parser = _made(path, found)
        if "reward" not in (self.parser.out_keys or []):
            raise ConfigError(
                f"env.reward={path}: it writes {self.parser.out_keys}, and no 'reward'; name a reward parser, such as "
                "torchrl.envs.llm:GSM8KRewardParser"
            )
        self.chat_env = TransformedEnv(ChatEnv(batch_size=(1,), input_mode="history"), self.parser)

    def __call__(self, completion: Completion, example: Example) -> Reward:
        before = self._before(completion, example)
        try:
            after = self.parser._step(before, before.exclude("history"))  # what TransformedEnv.step calls
        except KeyError as error:
            missing = " ".join(map(str, error.args)).partition("\n")[0]  # TensorDicts print over many lines
            raise LookupError(
                f"env.reward={self.path} reads what this row does not have: {missing}; the columns of the row "
                f"are {', '.join(example.row_data) or 'none'}"
            ) from error
        return _reward(after.select(*self.parser.out_keys, strict=False))

    def _before(self, completion: Completion, example: Example) -> TensorDict:
        """The chat as ("history", "prompt" | "response" | "full"), and the columns; [1]."""
        answer = {"role": "assistant", "content": completion.text}
        chat = History.from_chats([[*example.messages, answer]])
        history = {"prompt": chat[..., :-1], "response": chat[..., -1:], "full": chat}
        # As the environment of this parser would write it, for rows that have no column "answer".
        gold = str(example.answer)
        if isinstance(self.parser, GSM8KRewardParser):
            gold = f"#### {gold}"
        elif isinstance(self.parser, CountdownRewardParser) and isinstance(example.answer, Mapping):
            numbers = ",".join(map(str, example.answer["numbers"]))
            gold = f"target={example.answer['target']}, numbers={numbers}"
        columns = {"answer": gold, **example.row_data}
        before = TensorDict({"history": TensorDict(history, [1])}, [1])
        for name, value in columns.items():
            if name not in self.parser.out_keys:
                before[name] = NonTensorStack(NonTensorData(value))
        return before


def _made(path: str, found: Any) -> Transform:
    """A parser of its own: of a class the one without arguments, of an instance a copy."""
    cls = found if inspect.isclass(found) else type(found)
    if not issubclass(cls, Transform):
        raise ConfigError(
            f"env.reward={path}: {found!r} is of TorchRL, but no Transform that writes a reward"
        )
    try:
        return found() if found is cls else found.clone()
    except Exception as error:
        raise ConfigError(
            f"env.reward={path}: making one without arguments failed: {described(error)}; make it in a module of "
            "yours (graded = Parser(...)) and name that: env.reward=my_module:graded"
        ) from error


def _reward(written: TensorDictBase) -> Reward:
    """The score, and everything else that the parser wrote as parts: the mean of what has several numbers."""
    parts = {
        key if isinstance(key, str) else ".".join(key): float(value.double().mean())
        for key, value in written.items(include_nested=True, leaves_only=True)
        if isinstance(value, torch.Tensor)
    }
    score = parts.pop("reward")
    if "success" in parts:
        parts["accuracy"] = parts.pop("success")
    return Reward(score, parts)

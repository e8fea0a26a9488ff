"""Adapter of TorchRL reward parsers, such as `GSM8KRewardParser`, to rewards.

A reward parser is a `Transform` that writes "reward". Its input is as in TorchRL's chat environment: the chat with the
completion as its last message, and the columns of the row. This module imports torch, so it is imported only if
`env.reward` names a parser.
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
from envs.user_code import describe_exception


class ParserReward:
    """Reward function of one TorchRL parser.

    Args:
        path: value of `env.reward`, for messages.
        parser: class or instance of a parser.

    Raises:
        ConfigError: the parser is no Transform that writes a reward, or its constructor needs arguments.
    """

    def __init__(self, path: str, parser: Any) -> None:
        self.path = path
        self.parser = _make_parser(path, parser)
        if "reward" not in (self.parser.out_keys or []):
            raise ConfigError(
                f"env.reward={path}: the parser writes {self.parser.out_keys}, but no 'reward'; name a "
                "reward parser, such as torchrl.envs.llm:GSM8KRewardParser"
            )
        self.chat_env = TransformedEnv(ChatEnv(batch_size=(1,), input_mode="history"), self.parser)

    def __call__(self, completion: Completion, example: Example) -> Reward:
        inputs = self._input_tensordict(completion, example)
        try:
            outputs = self.parser._step(inputs, inputs.exclude("history"))  # as TransformedEnv.step does
        except KeyError as error:
            missing = " ".join(map(str, error.args)).partition("\n")[0]  # TensorDicts print over many lines
            raise LookupError(
                f"env.reward={self.path} reads keys that this row does not have: {missing}; the columns of "
                f"the row are {', '.join(example.row_data) or 'none'}"
            ) from error
        return _to_reward(outputs.select(*self.parser.out_keys, strict=False))

    def _input_tensordict(self, completion: Completion, example: Example) -> TensorDict:
        """Builds the parser's input of batch size [1].

        Keys are ("history", "prompt" | "response" | "full") and the columns of the row.
        """
        answer = {"role": "assistant", "content": completion.text}
        chat = History.from_chats([[*example.messages, answer]])
        history = {"prompt": chat[..., :-1], "response": chat[..., -1:], "full": chat}
        # The answer in the form of this parser's own environment, for rows without a column "answer".
        reference = str(example.answer)
        if isinstance(self.parser, GSM8KRewardParser):
            reference = f"#### {reference}"
        elif isinstance(self.parser, CountdownRewardParser) and isinstance(example.answer, Mapping):
            numbers = ",".join(map(str, example.answer["numbers"]))
            reference = f"target={example.answer['target']}, numbers={numbers}"
        columns = {"answer": reference, **example.row_data}
        inputs = TensorDict({"history": TensorDict(history, [1])}, [1])
        for name, value in columns.items():
            if name not in self.parser.out_keys:
                inputs[name] = NonTensorStack(NonTensorData(value))
        return inputs


def _make_parser(path: str, parser: Any) -> Transform:
    """Makes a new parser: an instance of a class, or a copy of an instance."""
    cls = parser if inspect.isclass(parser) else type(parser)
    if not issubclass(cls, Transform):
        raise ConfigError(
            f"env.reward={path}: {parser!r} is an object of TorchRL, but not a Transform that writes a "
            "reward; name a reward parser"
        )
    try:
        return parser() if parser is cls else parser.clone()
    except Exception as error:
        raise ConfigError(
            f"env.reward={path}: creating the parser without arguments failed: {describe_exception(error)}; "
            "create the parser in a module of your own (graded = Parser(...)) and set "
            "env.reward=my_module:graded"
        ) from error


def _to_reward(outputs: TensorDictBase) -> Reward:
    """Converts the outputs of a parser to a Reward.

    Outputs other than "reward" become reward components; an output of several numbers becomes its mean.
    """
    components = {
        key if isinstance(key, str) else ".".join(key): float(value.double().mean())
        for key, value in outputs.items(include_nested=True, leaves_only=True)
        if isinstance(value, torch.Tensor)
    }
    score = components.pop("reward")
    if "success" in components:
        components["accuracy"] = components.pop("success")
    return Reward(score, components)

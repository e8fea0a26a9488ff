"""Reads the reward that an agent reports by its output or value.

{"reward": 0.5, "components": {"accuracy": 1.0}}      components are optional, further keys are ignored
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from envs.reward_workers.scoring import MAX_FLOAT32, RESERVED_COMPONENTS

MAX_COMPONENTS, MAX_NAME_LENGTH = 64, 100
FORMS = 'None, a number, (number, components), or {"reward": number, "components": {name: number}}'


@dataclass(frozen=True)
class AgentResult:
    """Result of an agent that ended well.

    reward: None if the agent reports none. components: named parts of the reward.
    """

    reward: float | None
    components: dict[str, float] = field(default_factory=dict)


def read_last_line(output: str) -> AgentResult:
    """Reads the last line of an agent's output that is not empty.

    A line without a reward has the result None.

    Raises:
        ValueError: the line is a JSON object with a reward, but has a fault.
    """
    line = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    if not line.startswith("{") or '"reward"' not in line:
        return AgentResult(None)
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its last line of output is no valid JSON ({error}): {line[:200]}") from error
    if "reward" not in record:
        return AgentResult(None)
    try:
        return read_record(record)
    except ValueError as error:
        raise ValueError(f"its last line of output {line[:200]}: {error}") from error


def read_value(value: Any) -> AgentResult:
    """Reads the value that an agent's function returned.

    Raises:
        ValueError: the value has none of the accepted forms.
    """
    if value is None:
        return AgentResult(None)
    if isinstance(value, tuple) and len(value) == 2:
        value = {"reward": value[0], "components": value[1]}
    if not isinstance(value, Mapping):
        value = {"reward": value}
    if "reward" not in value:
        raise ValueError(f"it returned {repr(value)[:200]}; return {FORMS}")
    try:
        return read_record(value)
    except ValueError as error:
        raise ValueError(f"the value that it returned: {error}; return {FORMS}") from error


def read_record(record: Mapping[str, Any]) -> AgentResult:
    """Reads `reward`, which may be null, and `components`.

    Raises:
        ValueError: a value is no finite number, or the name of a component cannot be used.
    """
    reward, components = record["reward"], record.get("components")
    if components is None:
        components = {}
    if not isinstance(components, Mapping) or not all(isinstance(name, str) for name in components):
        raise ValueError(f"components={repr(components)[:200]} must be numbers by name")
    check_component_names(components)
    numbers = {name: _finite(f"components.{name}", value) for name, value in components.items()}
    return AgentResult(None if reward is None else _finite("reward", reward), numbers)


def check_component_names(components: Mapping[str, Any]) -> None:
    """Checks the number and the names of a reward's components, which are names of metrics.

    Raises:
        ValueError: too many components, or a name that is empty, too long or another metric's.
    """
    if len(components) > MAX_COMPONENTS or any(not 0 < len(name) <= MAX_NAME_LENGTH for name in components):
        raise ValueError(
            f"components has {len(components)} numbers; send at most {MAX_COMPONENTS}, with names of 1 to "
            f"{MAX_NAME_LENGTH} characters"
        )
    if reserved := RESERVED_COMPONENTS & components.keys():
        name = min(reserved)
        raise ValueError(f"components.{name}: reward/{name} is another metric; rename the component")


def is_reward_number(number: float) -> bool:
    """Whether a number is finite in float32, as rewards are."""
    return abs(number) <= MAX_FLOAT32


def _finite(name: str, value: Any) -> float:
    """Returns a number as float.

    Raises:
        ValueError: the value is no number that is finite in float32.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if is_reward_number(number):
            return number
    raise ValueError(f"{name}={repr(value)[:200]} must be a finite number, at most {MAX_FLOAT32:.2g}")

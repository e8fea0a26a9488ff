"""Formats README.md of an exported model: usage, training settings, reward curve and evaluations."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from config.cli.changed_settings import changed_overrides

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
DATASETS = {
    "gsm8k": "openai/gsm8k",
    "math": "DigitalLearningGmbH/MATH-lighteval",
    "dapo_math": "BytedTsinghua-SIA/DAPO-Math-17k",
}
"""Hub name of the data set that a task reads."""
Row = Mapping[str, Any]


def model_card(state: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Returns the model card: Markdown with a YAML head.

    state: that of the run, from its checkpoint. rows: metrics of the run; rows after the checkpoint are left out.
    """
    config, steps = state["config"], state["learner"]["optimizer_steps"]
    rows = [row for row in rows if row["optimizer_step"] <= steps]
    name, lora = config["model"]["name"], config["train_model"]["lora"]
    members = _members(config["env"])
    data = " and ".join(f"`{name}`" for name in members)
    weights = f"Weights are {config['model']['dtype']}."
    if lora["enabled"]:
        base = " on the base in 4 bits (nf4)" if lora["quantization"] != "none" else ""
        weights = (
            f"An adapter of rank {lora['r']}{base} was trained. It is merged into these weights "
            f"({config['model']['dtype']}), and lies in `adapter/` alone."
        )
    left_out = ("train.resume=", "run=", "logging.", "export.")
    overrides = [text for text in changed_overrides(config) if not text.lstrip("'").startswith(left_out)]
    script = "grpo_async.py" if state["overlapped"] else "grpo.py"
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if HUB_NAME.fullmatch(name) and not Path(name).exists() and not name.startswith("models/"):
        head.append(f"base_model: {name}")
    # Duplicates are removed: members of a mixture may share a data set.
    datasets = dict.fromkeys(DATASETS[task] for task in members.values() if task in DATASETS)
    if datasets:
        head += ["datasets:", *(f"- {dataset}" for dataset in datasets)]
    tags = ["grpo", "reinforcement-learning", *(["lora"] if lora["enabled"] else [])]
    head += ["tags:", *(f"- {tag}" for tag in tags), "---\n"]
    sections = [
        *head,
        f"# {Path(name).name}, trained with GRPO\n",
        f"`{name}` after {steps} optimizer steps ({state['iteration']} iterations) of reinforcement learning on "
        f"{data}, {config['env']['repeats']} completions a prompt. {weights}\n",
        "## Use\n",
        _use(lora),
        "## Training\n",
        "\n".join(["```", " \\\n    ".join([f"python {script} --config-name base", *overrides]), "```\n"]),
        *_curve(rows),
        *_evaluations(rows),
    ]
    return "\n".join(sections)


def _members(env: Mapping[str, Any]) -> dict[str, str | None]:
    """Returns the hub task of each data set by name; None for local files."""
    members = env["mixture"] if env["dataset"] == "mixture" else {env["dataset"]: env}
    settings = {name: value if isinstance(value, Mapping) else {} for name, value in members.items()}
    return {name: None if own.get("data_files") else own.get("dataset", name) for name, own in settings.items()}


def _use(lora: Mapping[str, Any]) -> str:
    text = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
messages = [{"role": "user", "content": "..."}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=256)[0]))
```

```
vllm serve FOLDER
```
"""
    if lora["enabled"] and lora["quantization"] == "none":
        text += """
The adapter alone, on the model that it was trained on:

```python
from peft import PeftModel

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("BASE"), "FOLDER/adapter")
```

```
vllm serve BASE --enable-lora --lora-modules trained=FOLDER/adapter
```
"""
    return text


def _curve(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a table of mean rewards over at most 12 spans of optimizer steps."""
    steps = [row for row in rows if "reward/mean" in row]
    if not steps:
        return
    yield "| optimizer steps | reward | response tokens |\n|---|---|---|"
    count = min(12, len(steps))
    for line in range(count):
        mine = steps[len(steps) * line // count : len(steps) * (line + 1) // count]
        first, last = mine[0]["optimizer_step"], mine[-1]["optimizer_step"]
        span = f"{first}" if first == last else f"{first} to {last}"
        yield f"| {span} | {_mean(mine, 'reward/mean'):.3f} | {_mean(mine, 'length/response_mean'):.0f} |"
    yield ""


def _mean(rows: Sequence[Row], key: str) -> float:
    return sum(float(row[key]) for row in rows) / len(rows)


def _evaluations(rows: Sequence[Row]) -> Iterator[str]:
    named = [(row, re.fullmatch("eval/(.+)/problems", key)) for row in rows for key in row]
    found = [(row, match[1]) for row, match in named if match]
    if not found:
        return
    yield "## Evaluation\n"
    yield "In brackets: 95% interval over problems.\n"
    yield "| set | iteration | optimizer steps | pass@1 | mean reward | problems |\n|---|---|---|---|---|---|"
    for row, name in found:
        steps, problems = row["optimizer_step"], row[f"eval/{name}/problems"]
        scores = " | ".join(
            f"{row[key]:.3f} [{row[f'{key}_low']:.3f}, {row[f'{key}_high']:.3f}]" if key in row else ""
            for key in (f"eval/{name}/pass@1", f"eval/{name}/score")
        )
        yield f"| {name} | {row.get('iteration', '')} | {steps} | {scores} | {problems:.0f} |"
    yield ""

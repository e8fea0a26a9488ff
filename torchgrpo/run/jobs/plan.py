"""Job `run=plan`: prints the plan, and checks plan, data and tokenizers for problems.

The machine is this one or the one that `machine.*` describes. The job touches no device and leaves no folder. A
plan that cannot work is still printed in full; the exit code is 2.
"""

import sys
from dataclasses import replace
from typing import Any

from config.run_folder.folders import remove_unused_folder
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from torchgrpo.run.checkpoint_model import resolve_checkpoint_models
from torchgrpo.run.job import Job


def run(job: Job[Any]) -> RunOutcome:
    from envs.option_checks import hub_notes, option_problems
    from torchgrpo.plan.machine import configured_machine, this_machine
    from torchgrpo.plan.plan_report import format_advice, format_plan, with_original_names
    from torchgrpo.plan.problems import Problem, plan_with_problems

    config, _ = resolve_checkpoint_models(job.config)
    machine = configured_machine(config.machine, this_machine(job.run_dir))
    plan, problems = plan_with_problems(config, job.schedule.is_overlapped, machine, job.run_dir)
    data_problems = option_problems(config) or _data_problems(config)
    problems += [Problem("", text) for text in _token_problems(config)]
    if not data_problems:
        plan = replace(plan, notes=(*plan.notes, *hub_notes(config)))
    problems += [Problem("", text) for text in data_problems]
    print(format_plan(with_original_names(plan, job.config), problems), flush=True)
    remove_unused_folder(job.run_dir)
    if problems:
        print(format_advice(plan, problems, machine), file=sys.stderr)
        sys.exit(2)
    return "finished"


def _data_problems(config: Config) -> list[str]:
    """Returns problems of the data.

    Prompts are checked where local rows and a tokenizer exist, else only rows.
    """
    from envs.option_checks import has_local_prompts, row_problems
    from torchgrpo.plan.model_shape import find_config_file

    if not has_local_prompts(config) or find_config_file(config.model.name) is None:
        return [*row_problems(config)]
    from torchgrpo.run.build_rollout import prompt_problem

    problem = prompt_problem(config)
    return [] if problem is None else [problem]


def _token_problems(config: Config) -> list[str]:
    """Returns a problem where the tokens of `ref_model.name` differ from the policy's.

    The check needs both tokenizers on this machine.
    """
    if config.ref_model.name is None:
        return []
    from torchgrpo.training.model_loading import load_saved_tokenizer
    from torchgrpo.training.reference_model_files import check_same_tokens, has_separate_reference, has_tokenizer

    models = (config.model.name, config.reference_model.name)
    if not has_separate_reference(config) or not all(map(has_tokenizer, models)):
        return []
    try:
        check_same_tokens(load_saved_tokenizer(config.model), config)
    except ConfigError as error:
        return [str(error)]
    return []

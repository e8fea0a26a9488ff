"""The job `run=plan`: prints the plan for this machine or the one that `plan.*` describes.

It touches no device and leaves no folder. A plan that cannot work is printed whole all the same, and ends with 2.
"""

import sys
from dataclasses import replace
from typing import Any

from config.run_folder.folders import remove_if_unused
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from torchgrpo.run.checkpoint_model import with_model
from torchgrpo.run.job import Job


def run(job: Job[Any]) -> RunOutcome:
    from envs.option_checks import hub_notes, option_problems
    from torchgrpo.plan.machine import imagined_machine, this_machine
    from torchgrpo.plan.plan_text import advice, report, with_typed_names
    from torchgrpo.plan.problems import Problem, planned

    config, _ = with_model(job.config)
    machine = imagined_machine(config.plan, this_machine(job.run_dir))
    plan, found = planned(config, job.schedule.overlapped, machine, job.run_dir)
    of_data = option_problems(config) or _data_problems(config)
    found += [Problem("", text) for text in _token_problems(config)]
    if not of_data:
        plan = replace(plan, notes=(*plan.notes, *hub_notes(config)))
    found += [Problem("", text) for text in of_data]
    print(report(with_typed_names(plan, job.config), found), flush=True)
    remove_if_unused(job.run_dir)
    if found:
        print(advice(plan, found, machine), file=sys.stderr)
        sys.exit(2)
    return "finished"


def _data_problems(config: Config) -> list[str]:
    """Problems of the prompts where a tokenizer can make them of local rows, else of the rows."""
    from envs.option_checks import reads_local_rows, row_problems
    from torchgrpo.plan.model_shape import find_file

    if not reads_local_rows(config) or find_file(config.model.name) is None:
        return [*row_problems(config)]
    from torchgrpo.run.build_rollout import prompt_problem

    problem = prompt_problem(config)
    return [] if problem is None else [problem]


def _token_problems(config: Config) -> list[str]:
    """Tokens of `ref_model.name` that are not the policy's, where both tokenizers are on this machine."""
    if config.ref_model.name is None:
        return []
    from torchgrpo.training.model_loading import load_saved_tokenizer
    from torchgrpo.training.teacher_files import check_same_tokens, has_tokenizer, scored_by_another

    both = (config.model.name, config.reference_model.name)
    if not scored_by_another(config) or not all(map(has_tokenizer, both)):
        return []
    try:
        check_same_tokens(load_saved_tokenizer(config.model), config)
    except ConfigError as error:
        return [str(error)]
    return []

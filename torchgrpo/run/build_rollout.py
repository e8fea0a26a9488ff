"""Builds prompt queue, chat encoder, multi-turn conversation, group rollout and evaluation from the config."""

from transformers import PreTrainedTokenizerBase

from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.chat import ChatEncoder
from envs.duplicates import distinct_examples
from envs.group import Sampling
from envs.prompt_checks import check_prompts
from envs.prompt_length import PromptLimit
from envs.prompts import PromptQueue, PromptSource
from envs.reward_workers.service import RewardService
from envs.task import Task, make_task
from envs.teacher_prompt import teacher_prompt
from envs.turns import Conversation, make_responders, with_tool_instructions
from torchgrpo.evaluation.eval_sets import EvalSet, load_eval_sets
from torchgrpo.evaluation.evaluation import Evaluation
from torchgrpo.monitoring.monitor import Monitor
from torchgrpo.plan.model_shape import find_shape
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.group_rollout import GroupRollout
from torchgrpo.training.model_loading import load_tokenizer, saved_eos_token_ids


def make_prompts(config: Config, task: Task, tokenizer: PreTrainedTokenizerBase) -> PromptQueue:
    """Loads the training prompts. Raises ConfigError if the data cannot be read."""
    teacher = teacher_prompt(config.policy)
    limit = PromptLimit(tokenizer, config.env.max_prompt_tokens, teacher)
    examples = with_tool_instructions(distinct_examples(task, config.env.split), config.env)
    check_prompts(tokenizer, examples, task.name)
    if teacher is not None:
        teacher.check(examples, data_setting(config.env))
    return PromptQueue(
        PromptSource(
            examples,
            seed=config.train.seed,
            fits_limit=limit,
            difficulty=config.env.difficulty,
            describe_length=limit.describe_length,
            curriculum=config.env.curriculum,
            setting=data_setting(config.env),
        )
    )


def data_setting(env: EnvConfig) -> str:
    """Returns the setting that names the training data, as `KEY=VALUE`."""
    if env.data_files is None:
        return f"env.dataset={env.dataset}"
    return f"env.data_files={env.data_files}"


def prompt_problem(config: Config) -> str | None:
    """Returns the error that a run would raise for its prompts, if any."""
    try:
        tokenizer = load_tokenizer(config.model)
        prompts = make_prompts(config, make_task(config.env), tokenizer)
        prompts.next_prompt()
        load_eval_sets(config, tokenizer, prompts.source.examples)
    except ConfigError as error:
        return str(error)
    return None


def make_conversation(config: Config, tokenizer: PreTrainedTokenizerBase) -> Conversation | None:
    """Builds the conversation that replies between turns; None for single-turn completions."""
    if config.env.turn_limit == 1:
        return None
    return Conversation(tokenizer, make_responders(config.env), config.env.turn_limit)


def make_encoder(config: Config, tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
    """Builds the encoder: the tokenizer, with the tokens that end a turn of this model."""
    shape = find_shape(config.model.name)
    embeddings = None if shape is None else shape.vocab_size
    return ChatEncoder(tokenizer, saved_eos_token_ids(config.model.name, tokenizer), embeddings)


def make_group_rollout(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation | None,
    loop: EngineLoop,
    rewards: RewardService,
) -> GroupRollout:
    """Builds the coroutine that samples and scores training groups."""
    inference = config.inference_model
    return GroupRollout(
        loop,
        make_encoder(config, tokenizer),
        loop.make_scorer(rewards),
        conversation,
        Sampling(
            inference.temperature,
            inference.top_p,
            inference.top_k,
            config.response_tokens,
            inference.min_p,
            tuple(inference.stop),
        ),
        config.env.candidates,
        config.env.repeats,
        config.train.seed,
        teacher=teacher_prompt(config.policy),
    )


def make_evaluation(
    config: Config,
    plan: Plan,
    sets: list[EvalSet],
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation | None,
    loop: EngineLoop,
    monitor: Monitor,
) -> Evaluation:
    """Builds the evaluation of these sets.

    Groups are sampled as in training, but with rewards, sampling settings and seeds of the set.
    """
    encoder = make_encoder(config, tokenizer)

    def make_set_rollout(eval_set: EvalSet, rewards: RewardService, seed: int) -> GroupRollout:
        settings = eval_set.settings
        max_tokens = settings.max_tokens or config.response_tokens
        sampling = Sampling(
            settings.temperature,
            settings.top_p,
            settings.top_k,
            max_tokens,
            settings.min_p,
            tuple(config.inference_model.stop),
        )
        return GroupRollout(
            loop, encoder, loop.make_scorer(rewards), conversation, sampling, settings.n, settings.n, seed
        )

    return Evaluation(
        config,
        2 * plan.engine.max_num_seqs * len(plan.devices.engines),
        sets,
        loop,
        make_set_rollout,
        monitor.progress.set_stage,
        monitor.log,
        monitor.run_dir,
        monitor.ledger.evaluation_writer,
        lambda: monitor.optimizer_step,
    )

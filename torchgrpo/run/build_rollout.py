"""What makes groups, put together: prompts in training order, and the coroutine with its tokenizer, judge and tools."""

from transformers import PreTrainedTokenizerBase

from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.chat import Encoder
from envs.duplicates import distinct_examples
from envs.group import Sampling
from envs.judging.service import RewardService
from envs.prompt_checks import check_prompts
from envs.prompt_length import PromptLimit
from envs.prompts import PromptQueue, PromptSource
from envs.task import Task, make_task
from envs.teacher_prompt import teacher_prompt
from envs.turns import Conversation, make_repliers, with_instructions
from torchgrpo.evaluation.evaluation import Evaluation
from torchgrpo.evaluation.sets import EvalSet, load_sets
from torchgrpo.monitoring.monitor import Monitor
from torchgrpo.plan.model_shape import find_shape
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.generate import Generation
from torchgrpo.training.model_loading import load_tokenizer, saved_eos_token_ids


def make_prompts(config: Config, task: Task, tokenizer: PreTrainedTokenizerBase) -> PromptQueue:
    """The prompts of training. Raises ConfigError for data that cannot be read."""
    teacher = teacher_prompt(config.policy)
    limit = PromptLimit(tokenizer, config.env.max_prompt_tokens, teacher)
    examples = with_instructions(distinct_examples(task, config.env.split), config.env)
    check_prompts(tokenizer, examples, task.name)
    if teacher is not None:
        teacher.check(examples, data_setting(config.env))
    return PromptQueue(
        PromptSource(
            examples,
            seed=config.train.seed,
            keep=limit,
            difficulty=config.env.difficulty,
            told=limit.told,
            curriculum=config.env.curriculum,
            setting=data_setting(config.env),
        )
    )


def data_setting(env: EnvConfig) -> str:
    """The setting that names the data of training, with its value."""
    if env.data_files is None:
        return f"env.dataset={env.dataset}"
    return f"env.data_files={env.data_files}"


def prompt_problem(config: Config) -> str | None:
    """Describe what a run would refuse of its rows and prompts, if anything."""
    try:
        tokenizer = load_tokenizer(config.model)
        prompts = make_prompts(config, make_task(config.env), tokenizer)
        prompts.begin_one()
        load_sets(config, tokenizer, prompts.source.examples)
    except ConfigError as error:
        return str(error)
    return None


def make_conversation(config: Config, tokenizer: PreTrainedTokenizerBase) -> Conversation | None:
    """What replies between turns; None where a completion has but one."""
    if config.env.max_steps == 1:
        return None
    return Conversation(tokenizer, make_repliers(config.env), config.env.max_steps)


def make_encoder(config: Config, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """The tokenizer, with the tokens that end a turn of this model."""
    shape = find_shape(config.model.name)
    embeddings = None if shape is None else shape.vocab_size
    return Encoder(tokenizer, saved_eos_token_ids(config.model.name, tokenizer), embeddings)


def make_generation(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation | None,
    loop: EngineLoop,
    rewards: RewardService,
) -> Generation:
    """Groups to train on."""
    inference = config.inference_model
    return Generation(
        loop,
        make_encoder(config, tokenizer),
        loop.judge(rewards),
        conversation,
        Sampling(inference.temperature, inference.top_p, inference.top_k, inference.max_tokens),
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
    """An evaluation of these sets: groups as those of training, with a judge, a sampling and seeds of their own."""
    encoder = make_encoder(config, tokenizer)

    def make_groups(chosen: EvalSet, rewards: RewardService, seed: int) -> Generation:
        own = chosen.settings
        max_tokens = own.max_tokens or config.inference_model.max_tokens
        sampling = Sampling(own.temperature, own.top_p, own.top_k, max_tokens)
        return Generation(loop, encoder, loop.judge(rewards), conversation, sampling, own.n, own.n, seed)

    return Evaluation(
        config,
        2 * plan.engine.max_num_seqs * len(plan.devices.engines),
        sets,
        loop,
        make_groups,
        monitor.live.stage,
        monitor.say,
        monitor.run_dir,
        monitor.ledger.evaluation,
        lambda: monitor.optimizer_step,
    )

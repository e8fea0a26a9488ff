"""Builds prompt queue, chat encoder, environments, group rollout and evaluation from the config."""

import asyncio
from contextlib import ExitStack

from transformers import PreTrainedTokenizerBase

from config.schema.agent import max_agents
from config.schema.config import Config
from config.schema.env import EnvConfig
from config.schema.errors import ConfigError
from envs.agents.runner import AgentRunner, check_agent_start
from envs.chat import ChatEncoder
from envs.chat_responses import ResponseParser
from envs.chat_suffix import check_user_replies
from envs.duplicates import distinct_examples
from envs.environments.episode_environments import EpisodeEnvironments, make_episode_environments, with_tools
from envs.group import Sampling
from envs.prompt_checks import check_prompts
from envs.prompt_length import PromptLimit
from envs.prompts import PromptQueue, PromptSource
from envs.reward_workers.group_reward import GroupReward
from envs.reward_workers.outcome_counts import OutcomeCounts
from envs.reward_workers.service import RewardService
from envs.task import Task, make_task
from envs.teacher_prompt import teacher_prompt
from torchgrpo.evaluation.eval_sets import EvalSet, load_eval_sets
from torchgrpo.evaluation.evaluation import Evaluation
from torchgrpo.monitoring.monitor import Monitor
from torchgrpo.plan.model_shape import find_shape
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.agent_driver import AgentDriver
from torchgrpo.rollout.conversation import ConversationParts, TurnLimits
from torchgrpo.rollout.endpoint.server import Endpoint
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.environment_driver import EnvironmentDriver
from torchgrpo.rollout.episode_player import EpisodeDriver, EpisodePlayer
from torchgrpo.rollout.group_rollout import GroupRollout
from torchgrpo.rollout.model_rewards.model_rewards import ModelRewards, make_completion_scorer
from torchgrpo.training.model_loading import load_tokenizer, saved_eos_token_ids

MAX_EPISODES = 1 << 30
"""Number of episodes at a time without `env.episodes`: every episode of a group in flight."""


def make_prompts(
    config: Config, task: Task, tokenizer: PreTrainedTokenizerBase, environments: EpisodeEnvironments | None
) -> PromptQueue:
    """Loads the training prompts. Raises ConfigError if the data cannot be read."""
    teacher = teacher_prompt(config.policy)
    limit = PromptLimit(tokenizer, config.env.max_prompt_tokens, teacher)
    examples = with_tools(distinct_examples(task, config.env.split), config.env, environments)
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
    environments = None
    try:
        tokenizer = load_tokenizer(config.model)
        environments = make_environments(config, tokenizer)
        prompts = make_prompts(config, make_task(config.env), tokenizer, environments)
        prompts.next_prompt()
        load_eval_sets(config, tokenizer, environments, prompts.source.examples)
    except ConfigError as error:
        return str(error)
    finally:
        close_environments(environments)
    return None


def make_environments(config: Config, tokenizer: PreTrainedTokenizerBase) -> EpisodeEnvironments | None:
    """Makes the environments of a run; None if every completion has one turn.

    Raises:
        ConfigError: an environment or tool has a fault, or the chat template writes no tools or no replies.
    """
    if config.env.agent is not None:
        check_agent_start(config.env)
    environments = make_episode_environments(config.env)
    with ExitStack() as on_error:
        on_error.callback(close_environments, environments)
        if environments is not None and environments.schemas:
            remedy = "env.tool_format=tags, or " if config.env.environment is None else ""
            ResponseParser(tokenizer, config.env.tool_parser).check_tools(remedy)
        if environments is not None and environments.sends_user_messages:
            check_user_replies(tokenizer)
        on_error.pop_all()
    return environments


def close_environments(environments: EpisodeEnvironments | None) -> None:
    """Closes environments before any loop has played an episode in them."""
    if environments is not None:
        asyncio.run(environments.close())


def close_model_rewards(model_rewards: ModelRewards) -> None:
    """Closes model rewards before any loop has called them."""
    asyncio.run(model_rewards.close())


def make_player(
    config: Config,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    environments: EpisodeEnvironments | None,
    loop: EngineLoop,
) -> EpisodePlayer | None:
    """Builds the player of episodes; None if every completion has one turn."""
    env = config.env
    if env.agent is None and environments is None:
        return None
    parts = make_conversation_parts(config, tokenizer, loop)
    driver: EpisodeDriver
    if environments is None:
        driver = AgentDriver(loop, AgentRunner(env), Endpoint(parts.encoder.token_texts))
        place, remedy = f"env.agent={env.agent}", "Correct the agent"
        max_alive = max_agents()
    else:
        driver = EnvironmentDriver(loop, environments)
        place = f"env.environment={env.environment}" if env.environment is not None else f"env.tools={env.tools}"
        remedy, max_alive = "Correct the environment", MAX_EPISODES
    loop.on_close.push_async_callback(driver.close)
    if env.episodes is not None:
        max_alive = env.episodes * len(plan.devices.engines)
    counts = OutcomeCounts(env.max_error_rate, f"episodes failed in {place}", remedy)
    return EpisodePlayer(parts, driver, env.episode_timeout_s, max_alive, counts)


def make_conversation_parts(config: Config, tokenizer: PreTrainedTokenizerBase, loop: EngineLoop) -> ConversationParts:
    """Builds the parts that the conversations of a run share."""
    env = config.env
    limits = TurnLimits(env.max_prompt_tokens, env.turn_limit, env.turn_tokens, tuple(env.turn_ends))
    parser = ResponseParser(tokenizer, env.tool_parser)
    return ConversationParts(loop, make_encoder(config, tokenizer), parser, limits, env.history == "append")


def make_encoder(config: Config, tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
    """Builds the encoder: the tokenizer, with the tokens that end a turn of this model."""
    shape = find_shape(config.model.name)
    embeddings = None if shape is None else shape.vocab_size
    return ChatEncoder(tokenizer, saved_eos_token_ids(config.model.name, tokenizer), embeddings)


def make_sampling(config: Config) -> Sampling:
    """Returns the sampling parameters of training."""
    one = config.inference_model
    return Sampling(one.temperature, one.top_p, one.top_k, config.response_tokens, one.min_p, tuple(one.stop))


def make_group_rollout(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    player: EpisodePlayer | None,
    loop: EngineLoop,
    rewards: RewardService,
    model_rewards: ModelRewards,
    group_rewards: RewardService | None,
) -> GroupRollout:
    """Builds the coroutine that samples and scores training groups.

    group_rewards: service of `env.group_reward`, or None.
    """
    return GroupRollout(
        loop,
        make_encoder(config, tokenizer),
        make_completion_scorer(loop, rewards, model_rewards),
        player,
        make_sampling(config),
        config.env.candidates,
        config.env.repeats,
        config.train.seed,
        teacher=teacher_prompt(config.policy),
        group_reward=None if group_rewards is None else GroupReward(loop.make_scorer(group_rewards)),
    )


def make_evaluation(
    config: Config,
    plan: Plan,
    sets: list[EvalSet],
    tokenizer: PreTrainedTokenizerBase,
    player: EpisodePlayer | None,
    loop: EngineLoop,
    model_rewards: ModelRewards,
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
        scorer = make_completion_scorer(loop, rewards, model_rewards)
        return GroupRollout(loop, encoder, scorer, player, sampling, settings.n, settings.n, seed)

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

"""Job `run=serve`: serves `model.name` to agents, without training, and writes every turn to `turns.jsonl`.

The endpoint, the engines and the sampling are those of a training run with `env.agent`.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from config.run_folder.folders import lock_folder
from config.schema.agent import DEFAULT_AGENT_TURNS
from config.schema.config import Config
from config.schema.errors import ConfigError, RunOutcome
from config.schema.models import RefModelConfig
from envs.example import Message
from torchgrpo.plan.plan import Plan
from torchgrpo.rollout.conversation import SampledTurn
from torchgrpo.rollout.endpoint.replies import encode_json
from torchgrpo.rollout.endpoint.server import Endpoint
from torchgrpo.rollout.engine_loop import EngineLoop
from torchgrpo.rollout.engines.build_engines import build_engine
from torchgrpo.rollout.served_conversations import ServedConversations
from torchgrpo.run.build_rollout import make_conversation_parts, make_sampling
from torchgrpo.run.build_run import plan_run, prepare
from torchgrpo.run.checkpoint_model import model_to_evaluate
from torchgrpo.run.job import Job
from torchgrpo.training.model_files import load_checked_tokenizer

TURNS_FILE = "turns.jsonl"


def run(job: Job[Any]) -> RunOutcome:
    with lock_folder(job.run_dir), model_to_evaluate(job.config, job.run_dir, job.schedule) as (config, _):
        plan = plan_run(replace(config, ref_model=RefModelConfig()), job.schedule, job.run_dir)
        prepare(config, plan)
        serve(config, job.run_dir, plan)
    return "finished"


class TurnWriter:
    """Writes one line for each turn, and reports the turn to the user."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("ab", buffering=0)
        self.num_turns: dict[int, int] = {}

    def write(
        self, episode: int, messages: Sequence[Message], tools: Sequence[dict[str, Any]], turn: SampledTurn
    ) -> None:
        """Writes messages, ids and log-probs of a turn."""
        number = self.num_turns[episode] = self.num_turns.get(episode, 0) + 1
        record = {
            "episode": episode,
            "turn": number,
            "messages": [*messages, turn.message],
            "tools": list(tools),
            "finish_reason": turn.finish_reason,
            "prompt": turn.context,
            "token_ids": turn.token_ids,
            "log_probs": turn.log_probs,
        }
        self.file.write(encode_json(record) + b"\n")
        seconds = turn.record.engine_seconds
        print(f"episode {episode}, turn {number}: {len(turn.token_ids)} tokens, {seconds:.2f} s", flush=True)


def serve(config: Config, run_dir: Path, plan: Plan) -> None:
    """Serves until an interrupt."""
    tokenizer = load_checked_tokenizer(config.model, config.max_model_len)
    with ExitStack() as ending:
        engine = build_engine(config, tokenizer, plan, run_dir)
        ending.callback(engine.close)
        loop = EngineLoop(engine, config.inference_model.request_timeout_s, config.train.wait_timeout_s)
        ending.callback(loop.close)
        parts = make_conversation_parts(config, tokenizer, loop)
        turns = config.env.max_steps or DEFAULT_AGENT_TURNS
        parts = replace(parts, limits=replace(parts.limits, turns=turns))
        writer = TurnWriter(run_dir / TURNS_FILE)
        ending.callback(writer.file.close)
        conversations = ServedConversations(parts, make_sampling(config), config.train.seed, writer.write)
        endpoint = Endpoint(parts.encoder.token_texts, config.serve.host, config.serve.port)

        async def serve_requests() -> None:
            try:
                await endpoint.start()
            except ConfigError as error:
                raise ConfigError(
                    f"{error}; set serve.host to an address of this machine, and serve.port to a free port or 0"
                ) from error
            loop.on_close.push_async_callback(endpoint.stop)
            print(
                f"OPENAI_BASE_URL={endpoint.url}\nOPENAI_API_KEY={endpoint.open_episode(conversations)}\n"
                f"every turn is written to {run_dir / TURNS_FILE}; end with Ctrl-C",
                flush=True,
            )
            await asyncio.get_running_loop().create_future()

        try:
            loop.run(serve_requests())
        except KeyboardInterrupt:
            print(f"{sum(writer.num_turns.values())} turns in {run_dir / TURNS_FILE}", file=sys.stderr, flush=True)

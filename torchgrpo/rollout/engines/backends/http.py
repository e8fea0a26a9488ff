"""Engine backend `http`: factory of the pool of vLLM servers at `inference_model.urls`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from config.schema.config import Config
from torchgrpo.plan.model_shape import model_path
from torchgrpo.plan.plan import Plan
from torchgrpo.plan.server_command import server_command
from torchgrpo.rollout.engines.interface import Engine
from torchgrpo.rollout.engines.vllm_settings import AdapterShape
from torchgrpo.training.model_loading import saved_eos_token_ids


def engine_factory(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    run_dir: Path | None = None,
    adapter: AdapterShape | None = None,
) -> Callable[[], Engine]:
    """Returns a function that connects the servers; see `build_engine`."""
    eos = tuple(saved_eos_token_ids(config.model.name, tokenizer))
    return partial(_connect_servers, config, eos, plan, tokenizer, run_dir)


def _connect_servers(
    config: Config, eos: tuple[int, ...], plan: Plan, tokenizer: PreTrainedTokenizerBase, run_dir: Path | None
) -> Engine:
    from torchgrpo.rollout.engines.http_engine_pool import HTTPEnginePool
    from torchgrpo.rollout.engines.http_pool_state import HTTPPoolSettings
    from torchgrpo.rollout.engines.http_server import ServerRequirements
    from torchgrpo.rollout.weights.transports.weight_folder import make_weight_folder

    inference, model = config.inference_model, model_path(config.model.name)
    requirements = {
        url.rstrip("/"): ServerRequirements(
            model=model,
            vocab_size=None if plan.shape is None else plan.shape.vocab_size,
            max_model_len=config.max_model_len,
            dtype=plan.engine.dtype,
            needs_tokenizer=bool(inference.stop or config.env.turn_ends),
            gpu_command=server_command(plan, url),
            cpu_command=server_command(plan, url, on_cpu=True),
        )
        for url in inference.urls
    }
    settings = HTTPPoolSettings(
        model=model if not Path(model).is_dir() else str(Path(model).resolve()),
        requirements=requirements,
        end_token_ids=eos,
        max_model_len=config.max_model_len,
        update=inference.update,
        window=2 * plan.engine.max_num_seqs,
        score_bound=plan.weight_check.bounds.mean,
        start_timeout_s=inference.start_timeout_s,
        request_timeout_s=inference.request_timeout_s,
    )
    return HTTPEnginePool(settings, make_weight_folder(plan), tokenizer)

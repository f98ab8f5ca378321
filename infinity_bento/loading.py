"""From the settings of one model to a served model: files, layout, tokenizer, weights, heads, self-check, warm-up.

Called by ``Engine.load`` in its loading thread. The one place where checkpoints, models, heads and runners meet.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

# transformers resolves its names lazily, and not safely from two threads at once: what both the tokenizer thread and
# the weights thread need is resolved here, in the stage that is named after it.
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AttentionInterface, AutoTokenizer  # noqa: F401

from infinity_bento.batching.batcher import Batcher
from infinity_bento.batching.packing import computed_tokens
from infinity_bento.checkpoints.decisions import Protocol
from infinity_bento.checkpoints.families import length_limit
from infinity_bento.checkpoints.late_interaction import read_late_interaction
from infinity_bento.checkpoints.layout import Layout
from infinity_bento.checkpoints.learned_sparse import read_learned_sparse
from infinity_bento.checkpoints.preflight import ModelPlan, calibration_file, find_files, read_plan
from infinity_bento.checkpoints.purpose import HeadKind
from infinity_bento.core import ModelInfo, Pooling, Task
from infinity_bento.engine import MODEL_STAGES
from infinity_bento.errors import ConfigError
from infinity_bento.heads.build import (
    build_classifier_head,
    build_embedding_head,
    build_token_classifier_head,
    build_verdict_head,
    prompt_excluded,
)
from infinity_bento.heads.decisions.build import Model, build_protocol
from infinity_bento.heads.decisions.protocol import DecisionProtocol
from infinity_bento.heads.embedding import EmbeddingHead
from infinity_bento.heads.late_interaction import build_late_interaction_head
from infinity_bento.heads.listwise import load_listwise_head
from infinity_bento.heads.sparse import build_sparse_head
from infinity_bento.heads.token_embeddings import TokenEmbeddingHead
from infinity_bento.inputs.decisions import DecisionTokenizer
from infinity_bento.inputs.late_interaction import load_late_interaction_tokenizer
from infinity_bento.inputs.listwise import ListwiseTokenizer
from infinity_bento.inputs.pool import TokenizerPool
from infinity_bento.inputs.static import load_routed_tokenizer, load_static_tokenizer
from infinity_bento.inputs.templates import chat_template_arguments
from infinity_bento.inputs.tokenization import TextRules, TextTokenizer, load_text_tokenizer
from infinity_bento.inputs.tokenizer_files import load_tokenizer_files
from infinity_bento.models.backbone import Backbone, load_backbone
from infinity_bento.models.linears import Kernel, LinearPlan, Precision, has_fast_bfloat16, has_onednn
from infinity_bento.models.static import RoutedBackbone, StaticBackbone
from infinity_bento.runners.allocator import keep_freed_memory
from infinity_bento.runners.lane import BusyLanes, Lane, LanePlan
from infinity_bento.runners.runner import Runner
from infinity_bento.served_model import ServedModel
from infinity_bento.settings import ModelSettings, Settings, available_cpus
from infinity_bento.telemetry.metrics import Metrics
from infinity_bento.telemetry.startup import Stages

logger = logging.getLogger(__name__)

# On the CPU a bigger batch buys nothing beyond this, and costs latency and memory.
CPU_BATCH_TOKENS = 1024
# Below this a token costs noticeably more; a millisecond is little beside the batch that is running meanwhile.
CPU_PATIENCE_TOKENS = 384
CPU_PATIENCE_SECONDS = 0.008
CPU_PATIENCE_GAP_SECONDS = 0.004
SWITCH_SECONDS = 0.0005
# The queue holds this many full batches; more would only be answered after their clients gave up.
QUEUE_BATCHES = 32

AnyBackbone = Backbone | StaticBackbone | RoutedBackbone
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    settings: ModelSettings,
    server: Settings,
    stages: Stages,
    *,
    prefix: str,
    busy: BusyLanes,
    metrics: Metrics | None,
) -> ServedModel:
    """Load one model and start its threads.

    Args:
        settings: Of this model.
        server: Of the whole server.
        stages: Reports progress; its names are ``engine.stage_names``.
        prefix: Of the stage names of this model.
        busy: Shared by the models of a process.
        metrics: Where counts go.

    Raises:
        LoadError: If the checkpoint cannot be served; names the file and the key.
        ConfigError: If an option cannot be honoured for this checkpoint or on this machine.
    """
    find, read, load, check, warm = (prefix + stage for stage in MODEL_STAGES)
    with stages.stage(find):
        found = find_files(settings, server)
        stages.detail(f"{found.source}, {found.path}")
    with stages.stage(read):
        plan = read_plan(settings, found)
    device = choose_device(settings.torch_device)
    if device.type == "cpu":
        keep_freed_memory()
        # A device thread asks for Python's lock after every operation, and would wait 5 ms each time that the event
        # loop or another lane is computing in Python.
        sys.setswitchinterval(SWITCH_SECONDS)
    dtype = choose_dtype(settings.dtype, device)
    with stages.stage(load), ThreadPoolExecutor(1, thread_name_prefix="load-tokenizer") as executor:
        tokenizer_job = executor.submit(load_tokenizer, plan, settings)
        backbone = load_model_backbone(plan, settings, dtype=dtype, device=device)
        tokenizer = tokenizer_job.result()
        heads = build_heads(plan, settings, backbone, tokenizer)
        if Task.DECIDE in heads:
            tokenizer = DecisionTokenizer(
                tokenizer,
                heads[Task.DECIDE].encode,
                budget=settings.max_batch_tokens,
                computed=partial(computed_tokens, causal=backbone.causal),
            )
    with stages.stage(check):
        backbone.self_check()
    runner = Runner(backbone, heads)
    shares = backbone.causal or plan.purpose.protocol == Protocol.BLOCK
    lane_plan = plan_lanes(device, settings.max_batch_tokens, workers=server.workers, shares_prefixes=shares)
    if device.type == "cpu":
        logger.info("model %s: %s", settings.served_model_name, cpu_choices(backbone, lane_plan))
    with stages.stage(warm):
        if server.warmup:
            torch.set_num_threads(lane_plan.lone_threads or torch.get_num_threads())
            runner.warm_up(lane_plan.batch_tokens, tokenizer.rules.max_input_length)
    info = describe(settings, plan, tokenizer, backbone, heads)
    return start(info, tokenizer, runner, lane_plan, busy, metrics)


# Device and tokenizer --------------------------------------------------------------------------------------------


def choose_device(name: str) -> torch.device:
    """The device of the option ``torch-device``.

    Raises:
        ConfigError: If the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"--torch-device {name} is not there: this machine shows {count} CUDA devices to torch "
                f"{torch.__version__}; use cpu or auto, or install a CUDA build of torch and a driver."
            )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--torch-device mps is not there: it needs a Mac with Apple silicon; use cpu or auto.")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the weights for the option ``dtype``; ``auto`` is float32 on the CPU and bfloat16 elsewhere.

    Raises:
        ConfigError: If ``mixed`` is asked of a device or processor that gains nothing by it.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name == "mixed":
        if device.type != "cpu":
            raise ConfigError(f"--dtype mixed is for the CPU, and this model runs on {device}; use bfloat16 or auto.")
        if not has_fast_bfloat16():
            raise ConfigError(
                "--dtype mixed needs a processor with bfloat16 units (AVX512-BF16 or AMX), which this one lacks; use "
                "float32 or auto."
            )
        return torch.float32
    return DTYPES[name]


def plan_linears(settings: ModelSettings, dtype: torch.dtype, device: torch.device) -> LinearPlan | None:
    """How the linears of a model run; None: as they are, on a device with kernels of its own or in half precision.

    Raises:
        ConfigError: If the option ``cpu-linear`` asks for a kernel that this build of torch lacks.
    """
    if device.type != "cpu" or dtype != torch.float32:
        return None
    kernel = None if settings.cpu_linear == "auto" else Kernel(settings.cpu_linear)
    if kernel in (Kernel.ONEDNN, Kernel.BOTH) and not has_onednn():
        raise ConfigError(
            f"--cpu-linear {kernel} needs oneDNN, which this torch ({torch.__version__}) lacks; use torch."
        )
    return LinearPlan(kernel, Precision.MIXED if settings.dtype == "mixed" else Precision.FLOAT32)


def load_tokenizer(plan: ModelPlan, settings: ModelSettings) -> TextTokenizer:
    """The checkpoint's tokenizer with its text rules."""
    layout, kind, budget = plan.layout, plan.purpose.kind, settings.max_batch_tokens
    rules = TextRules(
        max_input_length=plan.max_input_length,
        vocabulary_size=vocabulary_size(layout),
        auto_truncate=settings.auto_truncate,
        prompts=layout.prompts,
        default_prompt=plan.default_prompt,
        lower_case=bool(layout.do_lower_case),
        report_prompt_length=prompt_excluded(layout),
        template=plan.purpose.template,
        template_arguments=chat_template_arguments(layout.transformer.settings if layout.transformer else {}),
    )
    if kind is HeadKind.LATE_INTERACTION:
        late = read_late_interaction(layout)
        limit = length_limit(plan.family, layout.config)
        return load_late_interaction_tokenizer(layout, late, rules, position_limit=limit, token_budget=budget)
    if kind is HeadKind.STATIC:
        return load_static_tokenizer(layout.transformer_path, rules)
    if has_static_queries(plan):
        return load_routed_tokenizer(layout, read_learned_sparse(layout), rules, token_budget=budget)
    kind_of = ListwiseTokenizer if kind is HeadKind.LISTWISE else TextTokenizer
    return load_text_tokenizer(layout.tokenizer_path, rules, kind_of)


# Heads, threads, start -------------------------------------------------------------------------------------------


def load_model_backbone(
    plan: ModelPlan, settings: ModelSettings, *, dtype: torch.dtype, device: torch.device
) -> AnyBackbone:
    """The transformer, or the table of token vectors of a model that has none."""
    if plan.purpose.kind is HeadKind.STATIC:
        return StaticBackbone.load(plan.layout.transformer_path, device)
    transformer = load_backbone(
        plan.layout,
        plan.family,
        dtype=dtype,
        device=device,
        linears=plan_linears(settings, dtype, device),
        native_encoders=settings.native_encoders,
    )
    return RoutedBackbone(transformer) if has_static_queries(plan) else transformer


def has_static_queries(plan: ModelPlan) -> bool:
    """Whether queries are answered from a table of token weights."""
    return plan.purpose.kind is HeadKind.SPARSE and read_learned_sparse(plan.layout).query is not None


def vocabulary_size(layout: Layout) -> int:
    """Token ids there are; of a model without a transformer, tokens of its tokenizer."""
    if layout.transformer is not None:
        return int(layout.config["vocab_size"])
    from tokenizers import Tokenizer

    return int(Tokenizer.from_file(str(layout.transformer_path / "tokenizer.json")).get_vocab_size())


def build_heads(
    plan: ModelPlan, settings: ModelSettings, backbone: AnyBackbone, tokenizer: TextTokenizer
) -> dict[Task, Any]:
    """What this checkpoint can do, by task; tasks may share a head."""
    layout, purpose, config, device = plan.layout, plan.purpose, backbone.config, backbone.device
    head: Any
    if purpose.kind is HeadKind.STATIC:
        table = replace(layout, modules=layout.modules[1:])
        head = build_embedding_head(
            table, hidden_size=backbone.hidden_size, device=device, default_pooling=Pooling.MEAN
        )
    elif isinstance(backbone, StaticBackbone):
        raise AssertionError(f"a model without a transformer is no {purpose.kind.value}")
    elif purpose.kind is HeadKind.DECISION:
        head = build_decision_protocol(plan, settings, backbone, tokenizer)
    elif purpose.kind is HeadKind.LATE_INTERACTION:
        late = read_late_interaction(layout)
        head = build_late_interaction_head(layout, late, plan.family, hidden_size=backbone.hidden_size, device=device)
    elif purpose.kind is HeadKind.SPARSE:
        head = build_sparse_head(layout, plan.family, backbone, read_learned_sparse(layout))
    elif purpose.kind is HeadKind.CLASSIFIER:
        head = build_classifier_head(layout, purpose, config=config, device=device)
    elif purpose.kind is HeadKind.LISTWISE:
        head = load_listwise_head(layout.transformer_path, backbone.hidden_size, device)
    elif purpose.kind is HeadKind.YES_NO:
        head = build_verdict_head(layout, purpose, config=config, device=device, token_id=tokenizer.token_id)
    elif purpose.kind is HeadKind.TOKEN_CLASSIFIER:
        head = build_token_classifier_head(layout, purpose, config=config, device=device, reader=tokenizer)
    else:
        head = build_embedding_head(
            layout,
            hidden_size=backbone.hidden_size,
            device=device,
            default_pooling=plan.family.default_pooling,
            override=settings.pooling,
        )
    heads: dict[Task, Any] = dict.fromkeys(purpose.tasks, head)
    if purpose.kind is HeadKind.EMBEDDING:
        heads[Task.EMBED_ALL] = TokenEmbeddingHead(backbone.hidden_size)
    return heads


def build_decision_protocol(
    plan: ModelPlan, settings: ModelSettings, backbone: AnyBackbone, tokenizer: TextTokenizer
) -> DecisionProtocol:
    """How a decision model is asked and read."""
    assert plan.purpose.protocol is not None
    model = Model(
        folder=plan.layout.path,
        config=backbone.config,
        tokenizer=load_tokenizer_files(plan.layout.tokenizer_path),
        width=backbone.hidden_size,
        max_length=tokenizer.rules.max_input_length,
        dtype=backbone.dtype,
        device=backbone.device,
        calibration=calibration_file(settings),
    )
    return build_protocol(Protocol(plan.purpose.protocol), model)


def plan_lanes(
    device: torch.device, max_batch_tokens: int, *, workers: int = 1, shares_prefixes: bool = False
) -> LanePlan:
    """How batches run on a device: on the CPU one lane per core, else one lane that keeps the device busy.

    ``workers`` processes share the cores. A model that shares prefixes gets larger batches, as not all of their tokens
    are computed.
    """
    if device.type != "cpu":
        return LanePlan(1, 0, 0, max_batch_tokens, prefetch=True)
    cores = max(1, available_cpus() // workers)
    return LanePlan(
        lanes=cores,
        threads_per_lane=1,
        lone_threads=cores,
        batch_tokens=min(CPU_BATCH_TOKENS * (2 if shares_prefixes else 1), max_batch_tokens),
        patience_tokens=CPU_PATIENCE_TOKENS,
        patience_seconds=CPU_PATIENCE_SECONDS,
        patience_gap_seconds=CPU_PATIENCE_GAP_SECONDS,
    )


def cpu_choices(backbone: AnyBackbone, plan: LanePlan) -> str:
    """One line that says how this model runs on the CPU, and why."""
    lanes = f"{plan.lanes} lane{'s' * (plan.lanes > 1)} of one thread, as many as this process has cores"
    if not isinstance(backbone, Backbone) or backbone.linears is None:
        return f"{lanes}, linears as torch has them"
    processor = torch.backends.cpu.get_cpu_capability()
    encoder = "native encoder" if backbone.is_native else f"transformers' {type(backbone.module).__name__}"
    return (
        f"{lanes}; {encoder}; linears {backbone.linears.kernel} (processor has {processor}), "
        f"{backbone.linears.precision}"
    )


def describe(
    settings: ModelSettings,
    plan: ModelPlan,
    tokenizer: TextTokenizer,
    backbone: AnyBackbone,
    heads: Mapping[Task, Any],
) -> ModelInfo:
    """What ``/info`` says of a loaded model."""
    embedding = heads.get(Task.EMBED)
    dense = embedding if isinstance(embedding, EmbeddingHead) else None
    late = plan.purpose.kind is HeadKind.LATE_INTERACTION
    vectors = dense or (heads[Task.EMBED_ALL] if late else None)
    return ModelInfo(
        name=settings.served_model_name,
        model_id=settings.model_id,
        revision=plan.found.revision or settings.revision,
        source=plan.found.source,
        architecture=plan.layout.model_type,
        tasks=tuple(heads),
        device=str(backbone.device),
        dtype=str(backbone.dtype).removeprefix("torch."),
        max_input_length=tokenizer.rules.max_input_length,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_requests=settings.max_batch_requests,
        max_client_batch_size=settings.max_client_batch_size,
        max_concurrent_requests=settings.max_concurrent_requests,
        auto_truncate=settings.auto_truncate,
        tokenization_workers=settings.tokenization_workers,
        dimensions=vectors.dimensions if isinstance(vectors, EmbeddingHead | TokenEmbeddingHead) else None,
        pooling="+".join(dense.poolings) if dense else None,
        normalize=vectors.normalize if isinstance(vectors, EmbeddingHead | TokenEmbeddingHead) else False,
        similarity=plan.layout.similarity or ("MaxSim" if late else None),
        prompts=tokenizer.rules.prompts,
        default_prompt=tokenizer.rules.default_prompt,
        id2label=plan.purpose.id2label,
        decision_protocol=plan.purpose.protocol,
        listwise=plan.purpose.kind is HeadKind.LISTWISE,
        attention=backbone.attention_name,
        notes=plan.notes,
        created=int(time.time()),
    )


def start(
    info: ModelInfo,
    tokenizer: TextTokenizer,
    runner: Runner,
    plan: LanePlan,
    busy: BusyLanes,
    metrics: Metrics | None,
) -> ServedModel:
    """Start the threads of a loaded model."""

    # The model and its parts know each other; its threads start last, when all of it is there.
    batcher = Batcher(
        info.max_batch_tokens,
        max_requests=info.max_batch_requests,
        max_queue_tokens=QUEUE_BATCHES * info.max_batch_tokens,
        on_dropped=lambda count: model.observe_dropped(count),
    )
    pool = TokenizerPool(tokenizer, info.tokenization_workers, info.name)
    model = ServedModel(info, pool, batcher, [], metrics)
    for number in range(plan.lanes):
        lane = Lane(
            f"lane-{info.name}-{number}",
            batcher=batcher,
            runner=runner,
            plan=plan,
            busy=busy,
            in_flight=lambda: model.in_flight,
            on_batch=model.observe_batch,
            on_retry=model.observe_retried,
        )
        model.lanes.append(lane)
        lane.start()
    return model

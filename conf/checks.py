"""Rules between fields: what the types allow and a run cannot be.

Owns: `check` and the rules for training itself. Those for the model are checks_model.py's, for the cluster
checks_cluster.py's, those that look at data files checks_data.py's. Every rule is a generator of problems over a whole
configuration; nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from .budgets import budget_problems
from .checks_checkpoint import checkpoint_rules, initial_files
from .checks_cluster import cluster_rules
from .checks_data import data_rules, file_rules, root_rules
from .checks_environment import environment_rules, image_rules
from .checks_experts import expert_rules
from .checks_memory import memory_rules
from .checks_model import around, model_rules, nearest_of
from .checks_parallel import layout_of, parallel_rules
from .checks_profile import profile_rules
from .checks_task import task_rules
from .fields import members, show, without_none
from .load import to_plain
from .problems import Problem, Severity, nearest
from .schema import Config, ContextMethod, KernelsConfig, ParamDtype, Schedule

# What an op of stoker.kernels, which this package does not import, may be asked for; the schema has a field per op.
IMPLEMENTATIONS = ("auto", "reference", "native", "apex", "sdpa", "varlen", "flash")
OPS = tuple(name for name, hint in members(KernelsConfig).items() if without_none(hint) == (str, True))
_APEX = ("rmsnorm", "layernorm", "rope", "cross_entropy", "adamw", "l2norm", "scale", "cast_copy", "weight_gradient")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_INTERFACES = re.compile(r"[^\s/:,=^]{1,15}(?:,[^\s/:,=^]{1,15})*")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def check(config: Config, *, files: bool = True) -> list[Problem]:
    """Everything that is wrong or doubtful, errors first.

    files: look at the data and the tokenizer that the configuration names; False where they lie on another machine.
    Nothing is asked of Slurm: what the site allows is the launcher's to find out.
    """
    rules = [_strings, _identity, _ranges, _fabric, cluster_rules, environment_rules, task_rules, profile_rules]
    if not config.task.cmd:  # a script of the user's own reads none of this
        rules += [model_rules, _batch, _steps, _optimizer, _kernels, _validation, checkpoint_rules]
        rules += [memory_rules, parallel_rules, expert_rules, data_rules]
    problems = [problem for rule in rules for problem in rule(config)]
    if files:
        problems += [*root_rules(config), *image_rules(config)]
        problems += [] if config.task.cmd else [*file_rules(config), *initial_files(config)]
    return sorted(problems, key=lambda problem: problem.severity != "error")


def implementations(op: str) -> tuple[str, ...]:
    """What `kernels.<op>` may be, without plug-ins: names only, as this package does not import the kernels."""
    if op == "attention":
        return ("auto", "reference", "sdpa", "varlen", "flash")
    ours = () if op in ("dropout", "weight_gradient") else ("native",)
    return ("auto", "reference", *ours, *(("apex",) if op in _APEX else ()))


def errors(problems: Sequence[Problem]) -> list[Problem]:
    """Those that stop a launch."""
    return [problem for problem in problems if problem.severity == "error"]


def _strings(config: Config) -> Iterator[Problem]:
    """No string holds a line break or another control character: it would end up in a script, a log, a file name."""
    for field, text in _texts(to_plain(config), ""):
        if _CONTROL.search(text):
            yield Problem(field, repr(text), "holds a line break or another control character; expected one line")


def _fabric(config: Config) -> Iterator[Problem]:
    interface = config.fabric.interface
    if interface is not None and not _INTERFACES.fullmatch(interface):
        yield Problem("fabric.interface", interface, "expected an interface's exact name, as `ip link` shows it")


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield field, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        place = f"{field}.{key}" if field else str(key)
        if isinstance(key, str):
            yield place, key
        yield from _texts(item, place)


def _identity(config: Config) -> Iterator[Problem]:
    if not _NAME.fullmatch(config.name) or len(config.name) > 100:
        message = "names a directory and a job; expected up to 100 of A-Z a-z 0-9 . _ -, not beginning with . or -"
        yield Problem("name", config.name, message)
    if not config.run_root:
        yield Problem("run_root", "", "expected a directory for the run directories")
    for position, module in enumerate(config.plugins):
        if not _MODULE.fullmatch(module):
            yield Problem(f"plugins.{position}", module, "expected a module's importable name, like my_package.models")


_POSITIVE = (
    "train.steps train.global_batch train.micro_batch train.eval_batches model.vocab_size model.hidden_size"
    " model.num_layers model.num_heads model.num_kv_heads model.head_dim model.ffn_size model.rope_theta"
    " model.norm_eps model.rope_theta_local model.rope_factor model.rope_original_length model.rope_low_freq_factor"
    " model.rope_high_freq_factor model.rope_beta_fast model.rope_beta_slow model.attention_scale"
    " model.embedding_scale model.init_std model.experts_per_token model.router_scale data.seq_len"
    " data.shuffle_block parallel.tensor parallel.pipeline parallel.context parallel.expert parallel.bucket_mb"
    " parallel.timeout optim.lr optim.eps"
    " checkpoint.keep resilience.start_timeout resilience.save_timeout resilience.eval_timeout"
    " resilience.lease resilience.progress_steps tracking.interval cluster.nodes cluster.procs_per_node"
    " cluster.cpus_per_task cluster.omp_threads resilience.bad_node_hours"
)
_NOT_NEGATIVE = (
    "seed train.eval_interval model.z_loss model.attention_softcap model.logit_softcap model.sliding_window"
    " model.global_every model.max_positions model.norm_offset model.num_experts model.expert_ffn_size"
    " model.shared_expert_ffn_size model.dense_layers model.balance_weight model.balance_rate model.router_z_loss"
    " data.validation_tokens data.prefetch parallel.data_shard parallel.pipeline_chunks optim.min_lr"
    " optim.weight_decay optim.clip_norm optim.warmup_steps optim.decay_steps"
    " checkpoint.interval checkpoint.minutes checkpoint.staging_mb checkpoint.keep_every checkpoint.keep_best"
    " resilience.warning resilience.hang_timeout resilience.max_restarts"
    " resilience.backoff resilience.max_backoff"
    " cluster.gpus_per_node"
)
_BELOW_ONE = "model.dropout optim.beta1 optim.beta2"


def _ranges(config: Config) -> Iterator[Problem]:
    for field in _POSITIVE.split():
        value = _value(config, field)
        if value is not None and value <= 0:
            yield Problem(field, show(value), "expected a positive number")
    for field in _NOT_NEGATIVE.split():
        value = _value(config, field)
        if value < 0:
            yield Problem(field, show(value), "expected 0 or a positive number")
    for field in _BELOW_ONE.split():
        value = _value(config, field)
        if not 0 <= value < 1:
            yield Problem(field, show(value), "expected at least 0 and less than 1")
    yield from budget_problems(config.resilience.budgets)
    if config.seed >= 2**63:
        yield Problem("seed", str(config.seed), "expected less than 2^63")


def _value(config: Config, field: str) -> Any:
    value: Any = config
    for part in field.split("."):
        value = getattr(value, part)
    return value


def _batch(config: Config) -> Iterator[Problem]:
    layout, train = layout_of(config), config.train
    if layout is None or min(train.global_batch, train.micro_batch) < 1:
        return
    if not train.global_batch % (train.micro_batch * layout.data):
        return
    ranks = layout.data
    step = train.micro_batch * ranks
    below, above = around(train.global_batch, step)
    what = "processes" if layout.world == ranks else "data-parallel ranks"
    message = f"not a multiple of train.micro_batch={train.micro_batch} x {ranks} {what} = {step}"
    works = f"train.global_batch={f'{below} or {above}' if below else above}"
    share, rest = divmod(train.global_batch, ranks)
    if share and not rest:
        fits = nearest_of([n for n in range(1, share + 1) if share % n == 0], train.micro_batch)
        works += f", or train.micro_batch={fits}"
    yield Problem("train.global_batch", str(train.global_batch), f"{message}; nearest that work: {works}")


def _steps(config: Config) -> Iterator[Problem]:
    optim, steps = config.optim, config.train.steps
    if optim.warmup_steps > steps > 0:
        yield Problem("optim.warmup_steps", str(optim.warmup_steps), f"longer than the run: train.steps={steps}")
    elif optim.schedule is Schedule.wsd and optim.warmup_steps + optim.decay_steps > steps > 0:
        message = f"with optim.warmup_steps={optim.warmup_steps} longer than the run: train.steps={steps}"
        yield Problem("optim.decay_steps", str(optim.decay_steps), message)
    if optim.schedule is Schedule.wsd and optim.decay_steps == 0:
        yield _warning("optim.decay_steps", 0, "the wsd schedule never decays; give the length of its last part")
    if optim.schedule is not Schedule.wsd and optim.decay_steps:
        message = f"has no effect with optim.schedule={optim.schedule.value}; only wsd has a decay of its own"
        yield _warning("optim.decay_steps", optim.decay_steps, message)


def _optimizer(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.schedule is not Schedule.constant and optim.min_lr > optim.lr > 0:
        yield Problem("optim.min_lr", show(optim.min_lr), f"above optim.lr={show(optim.lr)}; lower it")
    if config.precision.params is ParamDtype.bfloat16 and config.cluster.gpus_per_node == 0:
        yield _warning(
            "precision.params", "bfloat16", "without GPUs (cluster.gpus_per_node=0) this is slow on most CPUs"
        )


def _kernels(config: Config) -> Iterator[Problem]:
    """Names only. Whether this machine has an implementation is seen where the run starts."""
    for field in ("default", *OPS):
        chosen = getattr(config.kernels, field)
        known = IMPLEMENTATIONS if field == "default" else implementations(field)
        if chosen is not None and chosen not in known and not config.plugins:  # which may bring their own
            yield Problem(f"kernels.{field}", chosen, f"no such implementation; {_meant(chosen, known)}")
    odd = [a for a in config.kernels.architectures if not 80 <= a < 1000]
    if odd:
        message = "expected compute capabilities from 8.0 on, times ten, as [80,90,100]"
        yield Problem("kernels.architectures", show(config.kernels.architectures), message)
    yield from _flash_attention(config)


def _flash_attention(config: Config) -> Iterator[Problem]:
    """What is asked for by name is honoured or refused."""
    field, p = "kernels.attention", config.parallel
    chosen = config.kernels.attention
    if chosen not in ("varlen", "flash"):
        return
    others = "choose auto or sdpa"
    if config.precision.params is not ParamDtype.bfloat16:
        yield Problem(field, chosen, f"has kernels for half precision only; {others}, or precision.params=bfloat16")
    if chosen == "varlen" and config.model.attention_softcap > 0:
        yield Problem(field, chosen, f"has no soft cap, which model.attention_softcap asks for; {others}, or flash")
    if p.context > 1 and p.context_method is ContextMethod.ring:
        message = "is not asked by the ring, which computes blocks with torch's kernels; leave it out"
        yield Problem(field, chosen, f"{message}, or choose parallel.context_method=ulysses")


def _meant(word: str, known: Sequence[str]) -> str:
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"there are: {', '.join(known)}"


def _validation(config: Config) -> Iterator[Problem]:
    held, interval, seq_len = config.data.validation_tokens, config.train.eval_interval, config.data.seq_len
    if interval > 0 and held == 0:
        message = "validation needs held-out data; set data.validation_tokens, or train.eval_interval=0"
        yield Problem("train.eval_interval", str(interval), message)
    elif interval == 0 and held > 0:
        message = "keeps data from training that nothing looks at; set train.eval_interval"
        yield _warning("data.validation_tokens", held, message)
    if 0 < held <= seq_len:
        message = f"holds not one sample; expected at least data.seq_len + 1 = {seq_len + 1}"
        yield Problem("data.validation_tokens", str(held), message)
    if interval > config.train.steps > 0:
        yield _warning("train.eval_interval", interval, f"longer than the run: train.steps={config.train.steps}")


def _warning(field: str, value: object, message: str) -> Problem:
    severity: Severity = "warning"
    return Problem(field, str(value), message, severity)

"""The typed configuration: every field a run can have, its type, its default and what it means.

Owns: names, types, defaults, and the comment behind each field, which docs/configuration.md is made of (reference.py).
Rules between fields are checks.py's; composing from YAML is compose.py's. Plain dataclasses that OmegaConf takes as
structured configs, so an unknown key or a wrong type is refused at composition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Schedule(str, Enum):
    cosine = "cosine"
    wsd = "wsd"  # warm-up, stable, decay
    linear = "linear"
    constant = "constant"


class ParamDtype(str, Enum):
    float64 = "float64"  # to compare layouts with
    float32 = "float32"
    bfloat16 = "bfloat16"  # with fp32 master weights in the optimizer


class Activation(str, Enum):
    """Of the feed-forward layer. The first two multiply by a gate of their own, `gelu` has none."""

    swiglu = "swiglu"
    geglu = "geglu"  # GELU, tanh form
    gelu = "gelu"  # tanh form


class Norm(str, Enum):
    rmsnorm = "rmsnorm"
    layernorm = "layernorm"  # with a bias


class NormOrder(str, Enum):
    pre = "pre"  # before attention and feed-forward layer
    post = "post"  # after them, before the sum (OLMo 2)
    both = "both"  # Gemma 2 and 3


class QkNorm(str, Enum):
    """RMSNorm on queries and keys."""

    none = "none"
    head = "head"  # over each head's features (Qwen3, Gemma 3)
    full = "full"  # over all heads' features together (OLMo 2)


class Positions(str, Enum):
    rope = "rope"
    learned = "learned"  # an embedding per position (GPT-2)


class RopeScaling(str, Enum):
    """How rotary frequencies are stretched to contexts longer than those of the first training."""

    none = "none"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


class Router(str, Enum):
    """How a mixture of experts turns scores into weights."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class Balance(str, Enum):
    """What keeps experts equally loaded."""

    none = "none"
    loss = "loss"  # an auxiliary loss per sequence
    bias = "bias"  # a bias in the choice of experts, adjusted after each step by the load of the global batch


class DataParallel(str, Enum):
    ddp = "ddp"  # every rank holds all
    zero1 = "zero1"  # optimizer state cut over the ranks
    fsdp = "fsdp"  # weights, gradients and optimizer state cut over the ranks
    hsdp = "hsdp"  # as fsdp within groups of ranks, which hold the same


class ContextMethod(str, Enum):
    ring = "ring"  # keys and values go round; zig-zag halves the work of each rank
    ulysses = "ulysses"  # all-to-all: sequence parts against heads


class Recompute(str, Enum):
    """Which activations of a block are computed again in the backward pass instead of kept."""

    none = "none"
    full = "full"  # all of them
    selective = "selective"  # only cheap ones: norms, activation functions, rotary embedding


class OptimizerKind(str, Enum):
    adamw = "adamw"
    muon = "muon"  # AdamW for embeddings, head, norms and biases


class Fp8(str, Enum):
    none = "none"
    tensorwise = "tensorwise"
    rowwise = "rowwise"


class Backend(str, Enum):
    auto = "auto"  # nccl with CUDA, else gloo
    gloo = "gloo"
    nccl = "nccl"


class ClusterKind(str, Enum):
    slurm = "slurm"
    local = "local"  # the same supervisor in the foreground or background of this machine


class Continuation(str, Enum):
    requeue = "requeue"
    chain = "chain"  # where requeue is forbidden: one successor job waits in the queue (--dependency=afterany)
    none = "none"  # stop at the first interruption; `stoker resume` goes on


class GpuRequest(str, Enum):
    """Which option of sbatch asks for GPUs."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"  # for sites where gpus-per-node is switched off
    gpus_per_task = "gpus_per_task"  # binds GPUs to tasks on some versions; the agent is the only task of a node


class ContainerRuntime(str, Enum):
    none = "none"
    pyxis = "pyxis"  # srun --container-image (enroot)
    apptainer = "apptainer"  # or singularity
    command = "command"  # words of your own before the interpreter: bubblewrap, podman-hpc, charliecloud, ...


class RankOrder(str, Enum):
    topology = "topology"  # nodes of one switch next to each other, then by name
    name = "name"


class TrackMode(str, Enum):
    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass
class ModelConfig:
    """A decoder: Llama's by default, with the switches that other families need."""

    vocab_size: int = 4096  # rows of the embedding; at least the tokenizer's
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 8  # query heads
    num_kv_heads: int = 4  # key and value heads (grouped-query attention); divides num_heads
    head_dim: int | None = None  # even; default hidden_size / num_heads
    ffn_size: int = 768  # inner width of the feed-forward layer
    activation: Activation = Activation.swiglu  # of the feed-forward layer
    norm: Norm = Norm.rmsnorm  # of the residual stream
    norm_order: NormOrder = NormOrder.pre  # where it stands
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to the weight of each RMSNorm, which then starts at 1 - norm_offset (Gemma: 1)
    qk_norm: QkNorm = QkNorm.none  # RMSNorm on queries and keys
    qkv_bias: bool = False  # biases on the projections to queries, keys and values
    linear_bias: bool = False  # biases on all other projections of the blocks
    positions: Positions = Positions.rope
    max_positions: int = 0  # rows of the learned position embedding; at least data.seq_len
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_theta_local: float | None = None  # of layers with a sliding window, without rope_scaling; default: as all
    rope_scaling: RopeScaling = RopeScaling.none
    rope_factor: float = 1.0  # of rope_scaling: how many times longer contexts get
    rope_original_length: int = 8192  # context that the frequencies were made for (llama3, yarn)
    rope_low_freq_factor: float = 1.0  # llama3
    rope_high_freq_factor: float = 4.0  # llama3
    rope_beta_fast: float = 32.0  # yarn
    rope_beta_slow: float = 1.0  # yarn
    sliding_window: int = 0  # tokens; 0 = full causal attention
    global_every: int = 0  # of the layers with sliding_window every n-th attends to all; 0 = none (Gemma 2: 2, 3: 6)
    attention_scale: float | None = None  # factor of the scores; default: head_dim ** -0.5
    attention_softcap: float = 0.0  # scores become cap x tanh(score / cap); 0 = none
    logit_softcap: float = 0.0  # the same for the output logits
    embedding_scale: float = 1.0  # factor of the embeddings (Gemma: sqrt(hidden_size))
    tied_embeddings: bool = False  # the output layer is the embedding
    init_from: str | None = None  # weights to begin with: hf:DIR (Hugging Face) or a checkpoint's directory
    init_std: float = 0.02  # standard deviation of the initial weights
    dropout: float = 0.0  # residual dropout
    z_loss: float = 0.0  # weight of the squared log-normaliser in the loss
    num_experts: int = 0  # experts per layer (mixture of experts); 0 = dense
    experts_per_token: int = 2
    expert_ffn_size: int = 0  # inner width of each expert; 0: ffn_size
    shared_expert_ffn_size: int = 0  # inner width of the expert that every token passes; 0: there is none
    dense_layers: int = 0  # the first so many layers have no experts
    router: Router = Router.softmax
    router_normalize: bool = True  # the weights of the chosen experts are divided by their sum
    router_scale: float = 1.0  # factor of these weights
    balance: Balance = Balance.loss  # what keeps experts equally loaded
    balance_weight: float = 0.01  # of the auxiliary loss (balance=loss)
    balance_rate: float = 0.001  # step of the bias (balance=bias)
    router_z_loss: float = 0.0  # weight of the squared log-normaliser of the router's scores


@dataclass
class DataSource:
    prefix: str = ""  # path of PREFIX.bin and PREFIX.idx without the suffix
    weight: float = 1.0  # share of the samples, on any scale
    name: str | None = None  # key of its sampling order; default: base name of prefix


@dataclass
class DataConfig:
    sources: list[DataSource] = field(default_factory=list)  # the mixture
    seq_len: int = 256  # tokens per sample that are predicted
    validation_tokens: int = 0  # the last tokens of each source, cut at a document boundary; 0 = no validation
    mask_documents: bool = False  # packed documents do not attend to each other
    reset_positions: bool = False  # positions start at 0 in each document
    shuffle_block: int = 1  # samples read in a row; > 1 keeps reads large on slow storage
    prefetch: int = 4  # micro-batches read ahead
    tokenizer: str | None = None  # tokenizer.json to hold the data against


@dataclass
class ParallelConfig:
    """Layout of the processes. The data-parallel size is what pipeline, context and tensor leave of them."""

    data: DataParallel = DataParallel.ddp
    data_shard: int = 0  # hsdp: ranks that share one copy; 0: those of a node
    tensor: int = 1  # ranks that share each layer
    sequence: bool = True  # with tensor > 1: norms and the residual stream are cut over these ranks too
    pipeline: int = 1  # ranks that hold the layers in turn
    pipeline_schedule: str = "1f1b"  # gpipe, 1f1b, interleaved, interleaved_zb, zbv or dualpipev
    pipeline_chunks: int = 0  # stages per rank; 0: what the schedule needs (interleaved: 2)
    pipeline_layers: str | None = None  # layers of each stage in order, e.g. 7,8,8,7; default: by cost
    context: int = 1  # ranks that share each sequence
    context_method: ContextMethod = ContextMethod.ring
    expert: int = 1  # ranks that share the experts; divides data x context x tensor
    backend: Backend = Backend.auto  # of torch.distributed; auto: nccl with CUDA, else gloo
    reduce_each: bool = False  # fsdp, hsdp: reduce in every micro-step; between them only shards of gradients are kept
    bucket_mb: float = 25.0  # gradients are reduced in buckets of this size, MiB
    timeout: int = 3600  # seconds a collective may take; the last resort behind the limits of `resilience`


@dataclass
class MemoryConfig:
    """What is given for memory."""

    recompute: Recompute = Recompute.none  # activations computed again in the backward pass
    recompute_every: int = 1  # of the layers every n-th is recomputed
    offload_optimizer: bool = False  # optimizer state lies in host memory, and is updated there


@dataclass
class OptimConfig:
    """AdamW with decoupled weight decay, or Muon."""

    kind: OptimizerKind = OptimizerKind.adamw
    muon_lr: float | None = None  # highest learning rate of the matrices under Muon, by the schedule of lr; default: lr
    muon_momentum: float = 0.95
    muon_steps: int = 5  # Newton-Schulz iterations
    lr: float = 3e-4  # highest learning rate
    min_lr: float = 3e-5  # learning rate at the last step
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # of matrices and embeddings; norms and biases are not decayed
    decay_embeddings: bool = True  # as most trainers do; false as in OLMo 2
    lr_factors: dict[str, float] = field(default_factory=dict)  # of the learning rate, per role, e.g. {embedding: 0.5}
    clip_norm: float = 1.0  # 0 = no clipping
    schedule: Schedule = Schedule.cosine  # shape of the learning rate after the warm-up
    warmup_steps: int = 0  # linear from 0
    decay_steps: int = 0  # wsd: length of the final decay


@dataclass
class PrecisionConfig:
    params: ParamDtype = ParamDtype.float32  # of the weights; bfloat16 keeps fp32 master weights in the optimizer
    stochastic_rounding: bool = False  # with bfloat16: no master weights, updates are rounded at random
    fp8: Fp8 = Fp8.none  # matrix products of the blocks in float8, on devices that have it
    deterministic: bool = True  # bitwise repeatable steps


@dataclass
class KernelsConfig:
    """Which implementation each fused op uses: auto, reference, native, apex; attention also: sdpa, varlen, flash."""

    default: str = "auto"  # for every op below that has this one and names none itself; ops without it: auto
    rmsnorm: str | None = None  # RMSNorm with fused residual add
    layernorm: str | None = None  # LayerNorm
    rope: str | None = None  # rotary position embedding of queries and keys
    swiglu: str | None = None  # silu(gate) * up
    geglu: str | None = None  # gelu(gate) * up
    gelu: str | None = None  # GELU
    attention: str | None = None  # causal self-attention
    cross_entropy: str | None = None  # loss from logits
    cross_entropy_stats: str | None = None  # of one shard of the vocabulary
    cross_entropy_grad: str | None = None  # of one shard of the vocabulary
    linear_cross_entropy: str | None = None  # last projection and loss, without all logits in memory
    weight_gradient: str | None = None  # gradients of weights, added to their sum
    dropout: str | None = None  # dropout with addressed random bits
    adamw: str | None = None  # update of many tensors
    l2norm: str | None = None  # norm of many tensors
    scale: str | None = None  # many tensors times one factor
    cast_copy: str | None = None  # many tensors into others of another dtype
    stochastic_round: str | None = None  # float32 to bfloat16 at random, for weights without masters
    moe_topk: str | None = None  # choice of experts and their weights
    moe_sort: str | None = None  # order of tokens' copies by expert, counts
    moe_permute: str | None = None  # rows of tokens into that order
    moe_unpermute: str | None = None  # and back: weighted sums of each token's copies
    quantize_fp8: str | None = None  # to float8 by one scale per tensor
    strict: bool = True  # what is asked for, or native on a GPU, and is not there: an error; false: the reference
    architectures: list[int] = field(default_factory=list)  # to build for, as 90 for 9.0; empty: the device's at hand
    compile: bool = False  # torch.compile each block; auto then leaves pointwise ops to the compiler


@dataclass
class CheckpointConfig:
    interval: int = 1000  # steps from one to the next; 0: none because of steps
    minutes: float = 0.0  # minutes from one to the next, whatever the steps; 0: none because of time
    at_end: bool = True  # after the last step
    asynchronous: bool = True  # train on while it is written; false: wait until it is on stable storage
    staging_mb: int = 0  # MB of host memory per rank for copies of the state; 0: two whole copies if they fit
    keep: int = 3  # newest valid checkpoints kept; the last verified one is never deleted
    keep_every: int = 0  # steps; from each multiple of it on the first one is kept besides; 0: none
    keep_best: int = 0  # so many with the lowest validation loss are kept besides
    storage: str | None = None  # where they lie: a directory or s3://BUCKET/PREFIX; default: in the run directory
    local: str | None = None  # directory on the nodes' own disks: written there first, copied on in the background
    stripes: int = 0  # Lustre: stripe count of large files; -1: all targets, 0: by the file's size


@dataclass
class ResilienceConfig:
    continuation: Continuation = Continuation.requeue  # after a time limit, preemption or node failure
    warning: int = 120  # seconds before the time limit at which Slurm warns the job
    hang_timeout: float = 0.0  # seconds without progress in a step: hung; 0: max(20 x median step, 120)
    start_timeout: float = 900.0  # seconds from fork to the first step
    save_timeout: float = 1800.0  # seconds a save may take
    eval_timeout: float = 1800.0  # seconds a validation may take
    lease: float = 15.0  # seconds without a word before agent and supervisor take each other for lost
    max_restarts: int = 3  # worker restarts in place without progress or a new checkpoint between them
    progress_steps: int = 10  # steps that count as progress between two crashes
    budgets: dict[str, int] = field(default_factory=dict)  # starts in a row without progress, per cause; -1: unlimited
    backoff: float = 30.0  # seconds before the next start after a failed one; doubles with each failure in a row
    max_backoff: float = 1800.0  # the longest of these pauses, seconds
    avoid_bad_nodes: bool = True  # exclude nodes that failed, for a while, in all runs below run_root
    bad_node_hours: float = 24.0  # hours for which a node is avoided


@dataclass
class TrackingConfig:
    mode: TrackMode = TrackMode.disabled  # of Weights & Biases; offline: recorded here, sent later
    project: str = "stoker"
    entity: str | None = None  # user or team; default: the account's
    group: str | None = None  # runs shown together
    tags: list[str] = field(default_factory=list)
    interval: float = 10.0  # seconds between looks at the metrics


@dataclass
class ContainerConfig:
    """Agents and workers run inside it; the supervisor and Slurm's commands on the host."""

    runtime: ContainerRuntime = ContainerRuntime.none  # command: words of your own, e.g. bwrap or podman-hpc
    image: str | None = None  # pyxis: .sqsh file or REGISTRY#IMAGE:TAG; apptainer: .sif file, directory or docker://...
    mounts: list[str] = field(default_factory=list)  # HOST[:INSIDE[:ro]] besides run, data and node-local directories
    python: str = "python3"  # interpreter inside, with torch; stoker's code comes with the run
    options: list[str] = field(default_factory=list)  # further options of srun (pyxis) or of `apptainer exec`
    command: list[str] = field(default_factory=list)  # runtime=command; {image}, {source}, {target} are filled in


@dataclass
class ClusterConfig:
    kind: ClusterKind = ClusterKind.slurm  # local: no Slurm, the same supervisor on this machine
    nodes: int = 1
    procs_per_node: int = 1  # worker processes per node: one per GPU
    gpus_per_node: int = 0  # asked of Slurm; 0 = CPU
    gpu_type: str | None = None  # as the site names it, e.g. h100
    gpu_request: GpuRequest = GpuRequest.gpus_per_node  # option of sbatch that asks for them
    cpus_per_task: int = 1  # per node's agent, shared by its workers
    gres: str | None = None  # generic resources besides GPUs: NAME[:TYPE][:COUNT], with commas
    mem: str | None = None  # memory per node: an integer with K, M, G or T; 0 = all of it
    mem_per_cpu: str | None = None  # instead of mem
    mem_per_gpu: str | None = None  # instead of mem
    tmp: str | None = None  # node-local disk that a node must have, written like mem
    time: str | None = None  # any of sbatch's forms
    begin: str | None = None  # first start not before: now+2hours, 2026-12-24T18:00, 16:00, tomorrow
    partition: str | None = None  # one, or several with commas
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None  # node features
    exclude: str | None = None  # nodes not to use
    nodelist: str | None = None  # nodes that must be among those used
    reservation: str | None = None
    licenses: str | None = None  # NAME[:COUNT], with commas
    switches: str | None = None  # COUNT[@TIME]: leaf switches at most, and how long to wait for that
    exclusive: bool = False  # share no node with other jobs
    nice: int | None = None  # lowers the job's priority
    comment: str | None = None  # of the job; stoker's token follows it
    mail_type: str | None = None  # as sbatch takes it, e.g. FAIL,TIME_LIMIT
    mail_user: str | None = None  # default: who submits
    sbatch: dict[str, str | None] = field(
        default_factory=dict
    )  # further long options, checked against a list; null = not given
    modules: list[str] = field(default_factory=list)  # loaded after a `module purge`, in this order
    conda: str | None = None  # environment (name or prefix) that is activated; its python is used
    setup: list[str] = field(default_factory=list)  # shell lines run before the supervisor, after modules and conda
    env: dict[str, str] = field(default_factory=dict)  # variables of the job; never a key or password
    python: str | None = None  # interpreter inside the job; default: the submitting one
    stage_env: bool = (
        False  # one archive of the Python environment is unpacked on each node, instead of thousands of reads
    )
    local_dir: str | None = None  # of each node, $NAME allowed; default: SLURM_TMPDIR, TMPDIR, or /tmp
    omp_threads: int = 1  # OMP_NUM_THREADS of each worker


@dataclass
class FabricConfig:
    """Network and placement, from what each node has. Variables that you set are never changed."""

    detect: bool = True  # set NCCL's and gloo's variables from the node's devices
    interface: str | None = (
        None  # exact name, of NCCL's bootstrap and of gloo; default: the one by which the other nodes reach this one
    )
    bind: bool = True  # each worker to its share of the CPUs near its GPU
    rank_order: RankOrder = RankOrder.topology  # nodes of one switch next to each other, or by name alone


@dataclass
class TaskConfig:
    """A training script of your own instead of stoker's trainer: docs/own-scripts.md."""

    cmd: list[str] = field(
        default_factory=list
    )  # one process per GPU, with torchrun's variables; empty: stoker's trainer
    stop_signal: str = "SIGTERM"  # sent to every process before the time limit or a preemption


@dataclass
class ProfileConfig:
    """A torch profiler trace of a few steps: docs/debugging.md."""

    steps: list[int] = field(default_factory=list)  # first and last step to trace, e.g. [10,12]; empty: none
    ranks: list[int] = field(default_factory=lambda: [0])  # whose steps are traced, a file each in report/
    memory: bool = False  # with a snapshot of the memory of CUDA's allocator


@dataclass
class TrainConfig:
    steps: int = 1000  # optimizer steps
    global_batch: int = 32  # samples per optimizer step
    micro_batch: int = 4  # samples per forward
    eval_interval: int = 0  # steps; 0 = no validation
    eval_batches: int = 8  # global batches per validation


@dataclass
class Config:
    """The whole of it."""

    name: str = "run"  # first part of the run directory's name, and the job's
    run_root: str = "runs"  # directory of the run directories; on storage that all nodes see
    seed: int = 0  # of initial weights, sampling order and dropout
    plugins: list[str] = field(default_factory=list)  # modules imported at start (models, data sets, callbacks)
    train: TrainConfig = field(default_factory=TrainConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    fabric: FabricConfig = field(default_factory=FabricConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

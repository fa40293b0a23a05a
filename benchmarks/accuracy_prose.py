"""The text of docs/accuracy.md around its tables: sources of the rows, and explanations of the remaining errors."""

MADE = """\
Made by `python benchmarks/accuracy.py` with {versions}, on a CPU.
All traced or predicted figures are compared with measurements that others published (benchmarks/data/README.md).
Errors are signed: predicted over published, minus 1. Predicted seconds follow rules for single kernels
(`ckpt_ft/memory/cost/`) that know no model.

Rows are **unseen** if no rule was chosen or changed with them in view, else **seen**. timm's models are split by their
names (`seen` in benchmarks/timm_steps.py): two constants of convolutions were read from the seen half, as the comments
beside them say, and two rules for fp32 were chosen with the fp32 rows in view. All other constants are those of single
kernels. The targets of T4 and FLUX.2 are the errors that these rows had before: they should not grow."""

T4 = """\
Remaining errors:

- fp16, allocated: a large block keeps up to 1 MiB that is not split off. Which block that is depends on what the
  process loaded and freed before the first step.
- NF4, allocated: as for fp16. Quantising while loading also leaves holes, so the base model of the published runs
  (Qwen) is up to 9 MiB above the sum of its tensors. The trace starts from a clean load.
- Reserved: the trace lacks the holes that loading leaves, which matter most when the whole step is small. Published
  repeats of a row differ by up to 12 MiB.
- Seconds: each row is the second step of a fresh process, on a card of 70 W that slows down as it warms up. If all
  other costs are as predicted, its matmul rate falls from 29 TFLOP/s in the shortest of the long rows (Qwen, eager)
  to 16 TFLOP/s in the longest (SmolLM2-1.7B); the Qwen step with eager attention, which does more work, takes 12 %
  less time than the one without. The prediction assumes a card under load, so it is too slow for short rows and too
  fast for long ones. Relative to sdpa, eager attention costs 0.43 ns per score in SmolLM2's rows and 0.30 ns in
  Qwen's NF4 rows; the prediction from its memory traffic is 0.34 ns. We know of no single-kernel timing in half
  precision on a T4 that would explain the difference. The rows of 2 x 512 tokens are bound by a host that is not
  named (`Host` in memory/cost/schedule.py)."""

FLUX2 = """\
"Step" is the third step of a process after a clean load. "Run" is the published loop of 750 steps (300 for all
weights), which calls `torch.cuda.empty_cache()` after each evaluation, every 100 steps (benchmarks/long_run.py).
Live tensors keep their segments after such a call, fragmented as the step left them, so the next step reserves up
to 4 % more. Before the first call the published LoRA run holds 10,068 MiB and the trace 10,064 MiB.

Remaining errors in bytes: waveft, fourierft and lily reserve most in their first hundred steps, before the cache is
emptied for the first time; the most likely cause is memory left from encoding prompts and images. After that the
published logs show 11,530, 11,762 and 9,844 MiB, and the traced runs reach 11,348, 11,834 and 9,980 MiB. waveft uses
no Fourier transform: its wavelets are strided transposed convolutions over each weight, for which the trace assumes no
workspace (memory/rules/cuda.py). For runs with few trained parameters (ia3, ln_tuning, oft, c3a) the prediction is 110
to 330 MiB above the measurement, and for SHiRA 200 MiB. Two causes are possible: the allocator's choice among free
blocks of equal size depends on addresses, which CUDA does not guarantee; and c3a's transforms of 256 elements may need
a work area smaller than their data. FRoD's adapted weights are in host memory, as its configuration sets.

Remaining errors in seconds: BOFT builds its block-diagonal matrices from 154,000 copies of 4 x 4 values, one kernel
each. The host issues them more slowly than the device runs them, and the driver's queue, which is not modelled,
bounds how far the host can be ahead. SHiRA adds sparse and dense weights through two fp32 copies. HRA, GraLoRA,
PEANuT, LoHa, DeLoRA, PSOFT and DEFT multiply small or whole weights in fp32, where the L40S uses the rates and
tiles of the L4. ln_tuning is predicted with norm weights in fp32, for which PyTorch does not use its fused norm;
with bf16 norm weights in the published run the error would be below 2 %."""

FIGURES = """\
Megabytes of 1e6 bytes, allocated. The remaining error of ResNet-50 is convolution workspace: which algorithm cuDNN
chooses for strided and 1x1 convolutions is not documented, and the trace assumes no workspace for them
(memory/rules/cuda.py). The error of the twelve blocks grows with the number of models trained before in the same
process, so some of their memory was still alive. No seconds were published for them."""

SHARDED = """\
Llama 3 8B under FSDP2; all predictions are for rank 0. The rows are torchtitan's (8,192 tokens) and torchao's
(4,096 tokens), benchmarks/data/fsdp2_llama3_8b.csv: fp32 parameters, gradients and Adam states, bf16 computation,
fused AdamW, gradient clipping, expandable segments, eager. The "GB" of the last two rows is read as GiB. The card
is the one that torchtitan names, an H100 of 500 W with HBM2e of 2.4 TB/s (`h100-500w`); torchao's rows name neither
card nor batch. Attention is FlashAttention-2, as the PyTorch of these runs used it on Hopper.

Remaining error in bytes: two samples of 8,192 tokens. The document of that row names no allocator options; without
expandable segments the trace gives 82.38 GiB. Remaining errors in seconds: the card's rates are those that its
owners measured for large single matmuls in 2024 (memory/gpus.py). A later version of their file has rates that are
a third higher, with which the predictions for torchtitan's rows would be more than 10 % too fast. The network does
not bound these rows: computation hides the collectives and the copies around them. torchao's rows take a fifth more
time per token than torchtitan's at half the length, although they compute less per token: they ran on other
hardware, which is not named."""

MANY_GPUS = """\
No rule was changed after these rows were first traced. They are torchtitan's of 2024, in eager mode
(benchmarks/data/fsdp2_many_gpus.csv). "Selective layer" checkpoints every second block. On the A100 a norm is one
kernel, as the configurations for 64 GPUs set it. The rows name no allocator options; traced with the default ones,
the row of 128 GPUs is 0.5 % high.

The rows do not say what connects the A100 machines. The project's multi-node script is for AWS, whose machine with
A100 80 GB has a network of 400 Gb/s. The column `predicted` assumes that network; the column before it assumes the
1,600 Gb/s of a DGX, the default of this package for the card. The time for which many ranks wait for each other is
not modelled."""

COMPILED = """\
torchtitan's rows (benchmarks/data/fsdp2_compiled.csv) are the same step under FSDP2 with and without `torch.compile`
of each block. The document names no allocator options, so they are traced with the default allocator; with expandable
segments, with which the table above has the eager step of eight GPUs, the trace gives 79.55 and 75.29 GiB. Compiling
saves 5.4 GiB on eight GPUs (5.41 predicted) and 5.0 GiB on 128 (5.41 predicted).

Remaining error in seconds: compiling gains 905 tokens a second on eight GPUs where 1,331 are predicted. Matmuls,
attention and FSDP2's copies are the same kernels in both steps, 1.95 of the 2.29 s; the fused kernels are predicted to
take 0.34 s by their bytes, where all kernels that they replace take 0.86 s. Of these, 0.14 s are instructions of casts
and strided operands beyond the bytes, at the clock to which matmuls push this card of 500 W (72 % of its highest, an
assumption). At the highest clock the eager step would take 2.73 s, the compiled one 2.28 s, and compiling would gain
1,172 tokens a second. Timings of single kernels on an L4 support that clock. The steps on a T4 do not (long rows in
fp16 would be up to 20 % too fast instead of 15 %), so the rule was not changed.

Matrix products in 8 bits take the rate that large ones reach on the card, and 1.15 times as long where torchao sums
gradients without fast accumulation (memory/gpus.csv, memory/cost/kernels.py). Before these two rules were added, the
rows in 8 bits were 12.7 and 22.9 % too fast, and torchtitan's row of 32,768 tokens 14.9 %.

In the trace of prime-rl's rows (its repository, benchmarks/baselines) nothing is compiled. Before it calls
FlashAttention-2, transformers searches the positions of a row for several packed sequences; this breaks the graph, and
torch.compile does not compile a checkpoint with a break. The predicted seconds are therefore those of the eager step,
and the published ones agree; compiled blocks would take 1.65 and 3.64 s. The loop of January 2026 deletes the variable
`logits` before the backward, but the dictionary that the model returned still holds them: one copy of the logits in
fp32 (4.6 and 9.3 GiB). Without this copy the trace was 15 and 17 % low; the cause was found in the loop's source,
after the rows had been seen.

torchao's ViT row (its optim README) is the allocated peak."""

PRIME_RL = """\
prime-rl's benchmark again (its repository, benchmarks/baselines; benchmarks/data/prime_rl.csv): nine further runs of
full training. They were traced for the first time after all rules for bytes were made, and none was changed since. In
seconds the first trace was 19 to 45 % too slow for long rows on H100, because FlashAttention-3 was timed as
FlashAttention-2. It has rates of its own since then, which are read from the figures of its paper (arXiv:2407.08608)
and not from these rows. The rows of reinforcement learning (`rl`) also compute log-probabilities and the entropy of
each token, which are not traced.

Steps of LoRA in the same folder are not comparable: prime-rl keeps four adapters at once. With one adapter, six of
them are traced 8.2 % too low to 3.9 % too high in bytes."""

EXPERTS = """\
prime-rl's benchmark of full training (its repository, benchmarks/baselines): every block checkpointed, experts by
grouped products, the loss in chunks of 2,048 tokens, two micro-batches of 16,384 tokens. The trace has fp32
parameters, gradients and Adam states, bf16 computation, FlashAttention-2, and a reduction of the gradients after each
micro-batch. Its loss is that of ordinary training under the policy `head`, without the terms of reinforcement
learning, and tokens are spread evenly over the experts.

axolotl's example of QLoRA for GLM-4.7-Flash with `quantize_moe_experts` is published in whole GiB. It is estimated
from the example's file with its evaluation, which is assumed to keep the whole logits; without an evaluation the
prediction is 18.38 and 30.11 GiB. The second row is predicted for PEFT 0.20, which axolotl 0.19 pins: it multiplies
the two factors of an adapter on experts before it adds them. For PEFT 0.21 the prediction is 32.23 GiB."""

LONG = """\
TRL's guide on long contexts (full fine-tuning, batch 1, sdpa, weights in bf16). The cards of the first two rows have
80 GB and are not named, so their seconds are an H100's. The third row is traced with
`accelerate_configs/context_parallel.yaml`, which has the `mixed_precision: bf16` of TRL's own configuration for
context parallelism: parameters and states are in fp32.

torchtitan's rows (benchmarks/data/fsdp2_parallel.csv) are traced with its own model, wrapped as its code does with
torch's `parallelize_module`: norms and residuals are divided along the sequence, the loss along the vocabulary. The
rows with and without tensor parallelism name neither the checkpointing nor the card. They are traced with torchtitan's
defaults of that time (selective op, expandable segments) on an H100 of 700 W. No rule was changed after they were
first traced.

The targets are 4 % in bytes and 15 % in seconds. The third row misses the target in bytes if its unit is 2**30 bytes,
which must be the unit of the rows above it. Its script prints "56.2 GB per GPU", and the prediction is 56.25e9 bytes.
The guide's 288 GB for the same step with whole logits and inputs on the card does not tell which unit it is: the
prediction is 295.6e9 bytes, or 275.3 GiB. The row without tensor parallelism is just beyond the target. The second
row's description says that 4 of 38 inputs of blocks stay on the card; transformers 5.23 moves all of them
(`save_on_cpu`), and `offload` fetches one ahead."""

HOST = """\
`python benchmarks/offloaded.py`. No rule or constant was fitted to these rows. Llama's rows are ALST's for one GPU
(ArcticTraining, projects/sequence-parallelism: ZeRO-3, parameters and Adam in host memory). Lengths and bytes are
those of its configurations, whose "GB" are 2**30 bytes of the whole device by NVML (arctic_training/debug/utils.py).
The prediction is the reserved bytes of the trace with expandable segments, which the configurations do not name, plus
the CUDA context. Tracing these rows showed two faults that have since been corrected: Liger's fused loss could not be
traced under ZeRO-3, and under ZeRO-3 the policy `offload` left tensors on the card that reused the addresses of
gathered weights, as it would in real runs. ALST tiles the MLP of the last row in 293 pieces; 32 are traced, because
293 take minutes; they hold up to 3 GB more. These five rows meet the target of 4 %. Their seconds assume one thread on
the host (`OMP_NUM_THREADS=1`), on which AdamW takes 28 s for 8 billion parameters.

The blog of Qwen3's rows (huggingface/blog, ulysses-sp.md) says that Adam is in host memory. Traced like that, 27.8,
9.3 and 38.4 GB are allocated, 64, 60 and 24 % less than published. The blog's own YAML writes `offload_optimizer:
{device: cpu}` into accelerate's `deepspeed_config`, where accelerate 1.15 reads only `offload_optimizer_device`
(utils/launch.py: prepare_deepspeed_cmd_env). With such a file Adam stays on the card, and the rows are traced with it
there; `estimate` refuses such a file and names the right key. Without ZeRO-3's buffer of bf16 gradients (8.04 and
2.01 GB), which DeepSpeed 0.19.8 allocates at the beginning, the first row would be at -0.5 % and the last at -0.2 %;
we do not know why it would be missing. The first row, at 10.06 %, misses the target of 4 %.

Only Qwen3's rows have speeds: 2,436, 2,315 and 13,396 tokens a second. Another version of the blog has 3,633 and 3,933
for the first two, and neither says whether it counts one GPU or all. These rows can therefore not decide whether the
seconds of an optimizer on the host meet their target of 25 %. With Adam on one thread of the host
(`OMP_NUM_THREADS=1`, the default of `accelerate launch`), a step of the first row is predicted to take 19.8 s: 26 %
less than the 26.9 s of 2,436 tokens a second, and 10 % more than the 18.0 s of 3,633. With Adam on the card it is
8.1 s. The row's time suggests that Adam was on the host, and its bytes suggest that it was not. Tests compare such
seconds on a calibrated machine (tests/memory/measure/test_calibrate.py)."""

BERT = """\
`python benchmarks/bert_large.py`; published in Hugging Face's documentation
(huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one), predicted before anything was compared. The last column
of the bytes is that first prediction. In steps without checkpointing it lacked exactly one tensor of attention scores
for each layer: PyTorch 1.10, which ran them, saved a softmax's input in addition to its result, and a mask of
transformers 4.15 made that input float32, also under fp16. No rule was changed; the other column is traced with these
facts of the old versions. The summary counts the first prediction. We do not know what else the fp16 step without
checkpointing holds.

The steps in fp32 keep the card busy. Those in fp16 with checkpointing are bound by the host, an unnamed one of January
2022, which was faster than the host that is assumed for a V100 (`Host` in memory/cost/schedule.py)."""

LONGEST = """\
`python benchmarks/accuracy.py --only longest`. ALST's longest sequences on one H200 (ArcticTraining,
projects/sequence-parallelism), beside the longest that `ckpt-ft max-length --policy ...` finds for the card. Their
bytes are in the table above. "At the published bytes" is the length at which the predicted bytes are those that the
run used, on the line through two traced lengths: it compares lengths where the published run left memory free. The
target is 8 %. Three rows meet it; the third run left 13.6 of 140.4 GiB free, and meets it at its own bytes. Published
lengths are multiples of 5,000 to 100,000 tokens."""

LONGEST_BLIND = """\
`python benchmarks/accuracy.py --only longest_blind`. ALST's longest sequences on H100s (the same configurations; the
first two rows are also in arXiv 2506.13996). The last column of lengths is what was predicted before anything was
compared, and the summary counts it. The target is 8 %, and no row meets it.

The first run does not end for lack of memory: its configuration says that 555,000 tokens stop with an illegal address
in a Triton kernel. A likely cause, not tested: at 524,288 tokens x 4,096 columns offsets exceed 31 bits.

The rows on eight GPUs missed more memory than one GPU does, whatever the length. The sources of NCCL and one of its
logs explain 3.3 GiB of it, the buffers of its connections (`nccl_bytes` in memory/cost/collectives.py), which are
counted since; no constant was fitted. At the published lengths, the third, fifth and fourth row still seem to leave
9.4, 9.4 and 10.5 GiB free. Of these, the sources name further parts that are not counted here: the runs used
reentrant checkpoints, which keep the output of the block that runs again (1.1 to 3.5 GiB); transformers 4.51 repeats
keys and values for sdpa (the fourth row); buffers of NVLink SHARP and of trees (0.25 to 0.6 GiB for each
communicator, where NCCL picks them); and what is left of 100,000 tokens, the step of the published lengths (2.5 to
5.3 GiB). The bytes of these runs are not published, so the sum cannot be checked. The configuration of the second row
names 3,800,000 tokens."""

KERNELS = """\
## Single kernels

fp32, one call of an operator timed alone (github.com/sitar-lab/NeuSight, its test set; TF32 off). `python
benchmarks/kernels.py`. The rates of these five cards were read from these rows, so a small bias is expected; the
test is how time depends on shape.

{kernels}

Power caps limit T4 and L4, and their times depend on what ran before: times below 20 ms of batched matmuls of one
shape and size differ by a factor of up to three. Longer calls were timed under load, as
a training step runs; among them the median error is {loaded}. Softmax and layer norm on an A100 are slower for rows
that are not a multiple of 1,024 elements (softmax of more than 1,024 elements uses the kernel of PyTorch 2.1; since
2.7 another kernel handles rows of up to 48 KiB).

The published times are measured by two events around one call on an idle card, so they contain the kernel and the
time that the host needs to issue it: 12 us for an elementwise operator, 15 us for a softmax, 19 us for a batched
matmul, 24 us for a LayerNorm and 32 us for a Linear with bias, read from the shortest rows of each on all cards.
This time is added here, but not in a step, where the host runs ahead.

## Operators of Hugging Face's models

Medians of triton.testing.do_bench (github.com/linkedin/Liger-Kernel, the rows of PyTorch and Hugging Face); mostly
bf16. `python benchmarks/operators.py`.

{operators}

The largest errors are those of the shortest kernels, a few microseconds long, to which the time of the host matters.
It is not included here."""

FP32 = """\
TF32 is off, attention is eager, there is no optimizer (github.com/sitar-lab/NeuSight; benchmarks/data/fp32_steps.csv).
The rates of these cards were read from single forward kernels of the same source.

The target is 5 % in the median and 12 % at worst; the median misses it. **All five rows are seen**: two rules were
chosen with them in view, before which they were at 17.1 and 36.1 %. First, on a card at its power cap, SMs that idle
in the last wave leave their power to the others. Second, matmuls whose summed dimension is not contiguous in both
operands, such as both matmuls of a linear layer's backward, use tiles of 128 x 128. The kernels' names in timings of
batched matmuls on Ampere and Ada show this; for single matmuls and on Hopper it is an assumption."""

LIVE = """\
## Random Trainer runs on a CPU

`python benchmarks/live_grid.py --runs 200 --seed S` (seeds 0 and 1 were stopped after some minutes): ACCallback's
predicted peak against its measured one, for six kinds of tiny language models, 25 optimizers, three precisions,
LoRA, DoRA and IA3, and six policies (torch 2.13, transformers 5.23, PEFT 0.21; seeds 0 and 1 also with bitsandbytes
0.50 and torchao 0.18).

| seed | runs | median | 95 % | worst |
|---:|---:|---:|---:|---:|
| 0 | 80 | 0.0001 % | 0.045 % | 0.13 % |
| 1 | 19 | 0.0077 % | 1.67 % | 19.26 % |
| 2 | 190 | 0.0001 % | 0.082 % | 1.17 % |
| 3 | 49 | 0.0001 % | 0.088 % | 2.98 % |
| 5 | 22 | 0.0043 % | 65.65 % | 66.58 % |

Seed 2 drew 200 runs with the optimizers of torch and transformers; ten did not train, because PEFT refuses dropout on
Mixtral's experts, and none was without a prediction. Two are above 1 %, both DoRA under `pointwise` (-1.17 % and -1.04
%). Two runs of seed 1 are above 1 %. `galore_adamw` with bfloat16 weights is -1.67 %: the measured peak is of the
first step, which decomposes gradients; the prediction describes the steps between. DoRA on GPT-2's transposed layers
was +19.26 % with gradient accumulation: the traced loop kept the graph of a micro-batch until the next one. This is
corrected, and the eight DoRA runs that were repeated agree within 0.001 %; the table has the figures before the
correction.

Seed 3 stopped after 13 minutes; its runs also draw an evaluation, of the loss or with metrics, whose peak counts.
Six did not train, for the same reason. Two are above 1 %, again DoRA under `pointwise` (-2.98 % and -1.02 %): the
policy confused new tensors with saved ones whose freed memory they reuse, so that it was left to chance what a step
kept. This is corrected; DoRA on five models in three precisions is within 0.03 %.

Seeds 4 and 5 also draw TRL's trainers (SFT, DPO, KTO, Reward, GRPO, RLOO), rows of unlike length, and the optimizers
of galore-torch, apollo-torch, schedulefree, lomo-optim, grokadamw, torch-optimi, bitsandbytes and torchao, in runs of
four steps. Both were stopped after at most 25 minutes on a shared machine. Seed 4 was stopped after 31 draws to
correct what it had shown, and is not in the table: eight runs were above 0.1 % and two had no prediction. Eight of
them were repeated after the corrections (a run whose first step holds the peak, schedule-free optimizers after an
evaluation, projection matrices of GaLore and APOLLO): all agree within 0.003 %.

In seed 5 six runs are above 0.1 %. Four are GRPO and RLOO (-60 to -67 %): their evaluation generates without a KV
cache, and had no prediction. Two are APOLLO (+5.30 and +0.77 %): the measurement missed the projection matrices. Both
are corrected, and three of the six were repeated, one of them GRPO's: +0.021, +0.002 and 0.000 %. Four runs did not
train: KTO needs two rows in a batch, and GRPO's evaluation a batch that its generations divide.

`python benchmarks/live_grid.py --runs 200 --seed 11` (rows: benchmarks/results/live_grid.jsonl; with TRL 1.16,
bitsandbytes, torchao and six packages of optimizers) is the first run that was not stopped: 182 of 200 draws
trained; a library or a policy's check refused the others. No run was repeated.

| runs | median | 95 % | worst |
|---:|---:|---:|---:|
| 182 | 0.0015 % | 0.041 % | 13.19 % |

Five rows are above 0.15 %, all with GrokAdamW (0.20, 0.79, 1.57, 3.07 and 13.19 %). It keeps states outside of
`optimizer.state`, on the host. The measurement on a CPU did not count them, while the trace of a phase did. Now both
do; four of the five were repeated since, and are within 0.032 %.

Seed 23 was drawn after that: 60 draws, of which 56 trained. PEFT refuses DoRA on Mixtral's experts, and the policy
`head` has nothing to do in a reward model. From this seed on, Mixtral's LoRA has no dropout; one draw was run again
for that reason.

| runs | median | 95 % | worst |
|---:|---:|---:|---:|
| 56 | 0.0003 % | 0.047 % | 0.20 % |

Single phases of these runs are within 0.25 %, whether or not they hold the peak, with two exceptions. The forward of
a run with two micro-batches of different sizes is -2.2 %; the cause is not known. In four of seven runs of GRPO and
RLOO with prompts of different lengths the generation is predicted up to 42 % too high: the prediction assumes that the
optimizer's states exist, and the longest prompts may come in the first step, before they do. In the worst run the
difference is the size of the states; for the other three this is inferred."""

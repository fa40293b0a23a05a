"""What docs/accuracy.md says about its tables: where the rows are from, and what is left."""

MADE = """\
Made by `python benchmarks/accuracy.py` with {versions}, on a CPU. What is called traced or predicted is; what it is
compared with was measured by others (benchmarks/data/README.md). Errors are signed: predicted over published, less 1.
Seconds follow the rules in memory/record/kernels.py and matmuls.py, which know single kernels and no model: no row of
a whole step was fitted to."""

T4 = """\
What is left:
- fp16, allocated: where an error is not zero, a large block keeps up to 1 MiB that is not split off, and which
  block that is depends on what the process loaded and freed before the first step.
- NF4, allocated: the same; quantising while loading leaves holes, and the base is up to 9 MiB above its tensors
  in the published runs (Qwen). The trace starts from a clean load.
- reserved: also the holes that loading leaves, which a trace does not have, most visible where the whole step is
  small; published repeats differ by up to 12 MiB themselves.
- seconds: the rows are the second step of a fresh process, on a card of 70 W that slows down while it gets warm.
  What it multiplies in a second falls from 29 TFLOP/s in the shortest of the long rows (Qwen, eager) to 16 in the
  longest (SmolLM2-1.7B), if all else is as predicted; the same Qwen step takes 12 % less time with eager
  attention than without, which does more work. The prediction is for a card under load: too slow for the short
  rows, too fast for the long ones. Eager attention, with what sdpa's would take added, costs SmolLM2's rows 0.43 ns
  for each score and Qwen's NF4 rows 0.30, where 0.34 is predicted for the bytes that it moves; no kernel in half
  precision on a T4 was timed alone that could say which part. The rows of 2 x 512 tokens take the host's time, which
  depends on a machine that is not named (`Host.beside`)."""

FLUX2 = """\
A step: the third one of a process, after a clean load. The run: the published 750 steps (300 of all weights), whose
loop calls `torch.cuda.empty_cache()` after each evaluation, every 100 steps (benchmarks/long_run.py). What is live
then keeps its segments, cut up as the step left them, and the next step does not find the room that it had: up to
4 % more. Before the first of these calls the published LoRA run holds 10,068 MiB and the trace 10,064.

What is left of the bytes: waveft, fourierft and lily hold most in their first hundred steps, before the cache was
emptied for the first time, most likely with what encoding prompts and images had left; from then on the published logs
hold 11,530, 11,762 and 9,844 MiB, and the traced runs at most 11,348, 11,834 and 9,980. waveft takes no Fourier
transform: its wavelets are transposed convolutions in steps of two over each weight, of which the trace takes no
workspace (memory/rules/cudnn.py). Of the runs with few trained bytes (ia3, ln_tuning, oft, c3a) 110 to 330 MiB more
are predicted than were reserved, and of SHiRA's 200: which of several free blocks of one size is taken depends on
addresses, which CUDA does not promise, and c3a's transforms of 256 elements may need less of a work area than the data
once. FRoD's adapted weights lie on the host, as its configuration asks.

Seconds: BOFT builds its block-diagonal matrices of 154,000 copies of 4 x 4 values, a kernel each: the host issues a
run of them more slowly than the device is through, and how far it is ahead by then is bounded by the driver's queue,
which is not modelled. SHiRA's sum of sparse and dense weights goes by way of two copies in fp32. HRA, GraLoRA, PEANuT,
LoHa, DeLoRA, PSOFT and DEFT multiply small or whole weights in fp32, where the L40S' rates and tiles are taken from
the L4's. ln_tuning is predicted with norm weights in fp32, for which PyTorch's fused norm is not used: were they in
bf16 in the published run, it would be within 2 %."""

FIGURES = """\
Megabytes of 1e6 bytes, allocated. What is left in ResNet-50 is convolution workspace: which algorithm cuDNN takes
for strided and 1x1 convolutions is not documented, and the trace takes none for them (memory/rules/cudnn.py). In
the twelve blocks it grows with the number of models that were trained before: something of theirs was still
alive. Of these no seconds were published."""

SHARDED = """\
Llama 3 8B under FSDP2; everything predicted is of rank 0. The rows are torchtitan's (8,192 tokens) and torchao's
(4,096), benchmarks/data/fsdp2_llama3_8b.csv: fp32 parameters, gradients and Adam states, bf16 computation, fused
AdamW, clipping, expandable segments, eager. "GB as printed" of the last two rows is taken as GiB. The card is the
one that torchtitan names, an H100 of 500 W with HBM2e of 2.4 TB/s (`h100-500w`); of torchao's rows neither card
nor batch is printed. Attention is FlashAttention-2, as the PyTorch of these runs took it on Hopper.

What is left, bytes: two samples of 8,192 tokens. The document of that row names no options of the allocator; without
expandable segments the trace has 82.38 GiB. Seconds: the card's rates are what its owners saw of large single matmuls
in 2024 (memory/gpus.py); a later version of their file has a third more, and with those torchtitan's rows would be
predicted more than 10 % too fast. The network is not what bounds them: collectives and the copies around them are
hidden behind computation. torchao's rows are a fifth slower per token than torchtitan's at twice the length, with
less to compute for each: they ran on something else, and what it was is not known."""

MANY_GPUS = """\
No rule was changed after these rows were first traced (benchmarks/data/fsdp2_many_gpus.csv; torchtitan's again, of
2024, eager; "selective layer" checkpoints every second block; norms in one kernel on the A100, as its configurations
for 64 of them say). No options of the allocator are named: traced with its default, the row of 128 GPUs is 0.5 % high.

What connects the machines of the A100 is not said with the rows. The project's script to start on several machines is
for AWS, whose machine with A100 of 80 GB has a network of 400 Gb/s: the column `predicted` is with that, the
one before it with the 1,600 Gb/s of a DGX, this package's default for the card. What many ranks wait for one another
is in no trace."""

KERNELS = """\
## Single kernels

fp32, one call of an operator timed alone (github.com/sitar-lab/NeuSight, its test set; TF32 off). `python
benchmarks/kernels.py`. The rates of these five cards are read off these rows, so that the bias is no surprise;
what is tested is how time goes with shape.

{kernels}

T4 and L4 are held back by their power caps, and what is left depends on what ran before: batched matmuls of one
shape and size differ by up to three times while they take less than 20 ms, which no shape explains. Those that take
longer were timed under load, as a training step runs: among them the median error is {loaded}. Softmax and layer
norms on an A100 are slower where rows are no multiple of 1,024 elements (softmax of more than 1,024 by the kernel of
PyTorch 2.1; since 2.7 another one takes rows of up to 48 KiB).

Two events stand around one call, on a card that is idle when the call begins: a published time holds the kernel and
what the host needs to issue it. That is 12 us for an elementwise operator, 15 for a softmax, 19 for a batched matmul,
24 for a LayerNorm and 32 for a Linear with its bias, read off the shortest rows of each on all cards alike. It is
added here, and not in a step, where the host runs ahead.

## Operators of Hugging Face's models

Medians of triton.testing.do_bench (github.com/linkedin/Liger-Kernel, the rows of PyTorch and Hugging Face);
mostly bf16. `python benchmarks/operators.py`.

{operators}

The worst are the smallest: kernels of a few microseconds, where the host's time counts, which is left out here."""

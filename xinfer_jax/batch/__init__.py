"""A file of prompts in, a file of answers out; killed at any moment and started again it ends with the same
bytes.

In the order to read: `lines` reads the input; `ledger` writes the output and records what is finished;
`work` is a line's way through the engine; `run` keeps the engine busy; `dataset` does the same for batches of
columns.

- This rests on the engine: a line's answer has the same bits in any company, so it does not matter which
  lines were finished before. What it draws with follows from the seed and its custom_id, or its number.
- A record (number, hash, where the output ends) is written once a second, after the disk has the lines that
  it speaks of. A line without one is cut off at the next start and answered once more.
- Beside the settings the record has our version, jax's, and the CPU's features. A run goes on where they
  differ, with a warning: what is finished stays, and the user may prefer other last bits to a new run.
- A line that cannot be served is answered too, by its reason: that hangs on nothing but the line.
- A command whose output holds such lines ends with exit code 1, whichever run answered them. It is over all
  the same, and started again it says so at once: where 1 means try again (OnFailure below), bound that
  (backoffLimit).
- Times stand in no line, neither do cached tokens: they differ between runs. The report has them.
- Completions of one prompt share its whole pages; the rest of the prompt is read with each.

Clusters. Every shard is a process of its own, and resumes as a whole run does:

    #SBATCH --array=0-15                      # SLURM
    xinfer-jax-batch --input=all.jsonl --output=answers.jsonl --shard=$SLURM_ARRAY_TASK_ID/16

    completionMode: Indexed                   # a Kubernetes Job; completions: 16, restartPolicy: OnFailure
    command: [sh, -c, "exec xinfer-jax-batch --input=/data/all.jsonl --output=/data/answers.jsonl
              --shard=$JOB_COMPLETION_INDEX/16"]

    xinfer-jax-batch --input=all.jsonl --output=answers.jsonl --merge=16

Several devices of one machine: --data_parallel=8, an engine for each. Ray Data, one engine for each worker,
to which Ray shows a GPU of its own (CUDA_VISIBLE_DEVICES):

    ray.data.read_json("all.jsonl").map_batches(
        xj.DatasetGenerator, fn_constructor_kwargs=dict(model=DIR, options=xj.GenerateOptions(64)),
        batch_size=256, compute=ray.data.ActorPoolStrategy(size=2), num_gpus=1)
"""

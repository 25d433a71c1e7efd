"""Batch inference: a file of prompts in, a file of answers out.

Read the files in this order: `input_lines` parses the input; `resumable_output` writes the output and its
progress file; `line_request` turns one line into engine requests and one output line; `run_settings` lists
what answers depend on; `run_batch` keeps the engine busy; `dataset` does the same for batches of columns.

- A run may be killed at any moment. Started again, it ends with the same bytes: the engine gives a line the
  same bits beside any other requests, so it does not matter which lines were finished before. The random key
  of a line depends only on the seed and the line's custom_id, or its number.
- Once a second the run syncs the output to disk, then appends a record for each line that is safe (number,
  hash, end offset in the output). The next start truncates lines without a record and answers them again.
- The progress file also stores the settings, our version, jax's version and the CPU features. If only a
  version or the machine differs, the run continues with a warning: finished lines stay, and the user may
  prefer slightly different last bits to a new run.
- A line that cannot be served gets an output line with the reason. The reason depends on the line alone.
- The command exits with code 1 if the output has error lines, from this run or an earlier one. The run is
  complete all the same: if it is started again, it exits with 1 at once. Where code 1 means "try again"
  (OnFailure below), set a limit (backoffLimit).
- Output lines have no times and no cached_tokens, which differ between runs. The report has them.
- Completions of one prompt share its full pages; each prefills the rest of the prompt itself.

Clusters. Each shard is a process of its own, and resumes like a whole run:

    #SBATCH --array=0-15                      # SLURM
    xinfer-jax-batch --input=all.jsonl --output=answers.jsonl --shard=$SLURM_ARRAY_TASK_ID/16

    completionMode: Indexed                   # a Kubernetes Job; completions: 16, restartPolicy: OnFailure
    command: [sh, -c, "exec xinfer-jax-batch --input=/data/all.jsonl --output=/data/answers.jsonl
              --shard=$JOB_COMPLETION_INDEX/16"]

    xinfer-jax-batch --input=all.jsonl --output=answers.jsonl --merge=16

Several devices of one machine: --data_parallel=8, one engine per device. Ray Data: one engine per worker; Ray
gives each worker its own GPU (CUDA_VISIBLE_DEVICES):

    ray.data.read_json("all.jsonl").map_batches(
        xj.DatasetGenerator, fn_constructor_kwargs=dict(model=DIR, options=xj.GenerateOptions(64)),
        batch_size=256, compute=ray.data.ActorPoolStrategy(size=2), num_gpus=1)
"""

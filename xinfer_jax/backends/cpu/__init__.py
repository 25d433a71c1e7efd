"""Forms for CPUs: `cpu_sampler` samples tokens, and `layer_forms` has attention, experts and the step of
linear attention.
"""

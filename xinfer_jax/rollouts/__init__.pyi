from ..engine.weight_receiver import WeightReceiver as WeightReceiver, receive_weights as receive_weights
from ..generation.rollouts import (
    PackedRollout as PackedRollout,
    continue_rows as continue_rows,
    pack_rollout as pack_rollout,
)
from ..generation.scoring import map_logits as map_logits
from ..processes.tensor_stream import send_weights as send_weights

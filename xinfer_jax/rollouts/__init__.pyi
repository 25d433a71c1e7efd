from ..generation.rollouts import (
    PackedRollout as PackedRollout,
    continue_rows as continue_rows,
    pack_rollout as pack_rollout,
)
from ..generation.scoring import map_logits as map_logits

from ..families.conversion import (
    ParamName as ParamName,
    param_names as param_names,
    params_from_tensors as params_from_tensors,
    params_to_tensors as params_to_tensors,
)
from ..weights.dequantization import dequantize as dequantize
from ..weights.layout import shardings as shardings
from ..weights.resharding import reshard as reshard
from ..weights.stacking import stack_layers as stack_layers, unstack_layers as unstack_layers

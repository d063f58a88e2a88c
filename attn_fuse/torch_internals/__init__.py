"""Private torch APIs, each under a name that says what it is for; a public name is used elsewhere where one exists.

Tried on torch 2.11.0, 2.13.0 and 2.15.0, on CPU.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx as make_fx
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._sympy.functions import FloorDiv as FloorDiv
from torch.utils._sympy.functions import Mod as Mod

from attn_fuse.torch_internals.dynamo import SOURCE as SOURCE
from attn_fuse.torch_internals.dynamo import LeftFunction as LeftFunction
from attn_fuse.torch_internals.dynamo import PassesThroughDynamo as PassesThroughDynamo
from attn_fuse.torch_internals.dynamo import RestartsDynamo as RestartsDynamo
from attn_fuse.torch_internals.dynamo import apart_from_dynamo as apart_from_dynamo
from attn_fuse.torch_internals.dynamo import calling_convention_of as calling_convention_of
from attn_fuse.torch_internals.dynamo import frames_of_break as frames_of_break
from attn_fuse.torch_internals.dynamo import graph_break as graph_break
from attn_fuse.torch_internals.dynamo import is_known_everywhere as is_known_everywhere
from attn_fuse.torch_internals.dynamo import known_backends as known_backends
from attn_fuse.torch_internals.dynamo import left_by_dynamo as left_by_dynamo
from attn_fuse.torch_internals.dynamo import name_sources as name_sources
from attn_fuse.torch_internals.dynamo import source_name as source_name
from attn_fuse.torch_internals.dynamo import trace_artifact as trace_artifact
from attn_fuse.torch_internals.inductor import compile_with as compile_with
from attn_fuse.torch_internals.inductor import compiled_for_any_size as compiled_for_any_size
from attn_fuse.torch_internals.inductor import inductor_door as inductor_door
from attn_fuse.torch_internals.inductor import inductor_modes as inductor_modes
from attn_fuse.torch_internals.inductor import inductor_options as inductor_options
from attn_fuse.torch_internals.inductor import open_inductor_door as open_inductor_door
from attn_fuse.torch_internals.inductor import without_inductor_attention as without_inductor_attention
from attn_fuse.torch_internals.kernels import cuda_driver as cuda_driver
from attn_fuse.torch_internals.kernels import cuda_sleep as cuda_sleep
from attn_fuse.torch_internals.kernels import flex_attention as flex_attention
from attn_fuse.torch_internals.kernels import flex_differentiates_what_it_reads as flex_differentiates_what_it_reads
from attn_fuse.torch_internals.kernels import flex_runs_on_cpu as flex_runs_on_cpu
from attn_fuse.torch_internals.kernels import sdpa_choice as sdpa_choice
from attn_fuse.torch_internals.kernels import sdpa_switches as sdpa_switches
from attn_fuse.torch_internals.modules import as_written as as_written
from attn_fuse.torch_internals.modules import backward_keeps_graph as backward_keeps_graph
from attn_fuse.torch_internals.modules import compiled_by_author as compiled_by_author
from attn_fuse.torch_internals.modules import eagerly as eagerly
from attn_fuse.torch_internals.modules import given_to_compile as given_to_compile
from attn_fuse.torch_internals.modules import going_on_where_compiling_fails as going_on_where_compiling_fails
from attn_fuse.torch_internals.modules import in_backward as in_backward
from attn_fuse.torch_internals.modules import looking_at_module_calls as looking_at_module_calls
from attn_fuse.torch_internals.symbols import called_on as called_on
from attn_fuse.torch_internals.symbols import holds_by_guard as holds_by_guard
from attn_fuse.torch_internals.tensors import CLAMP_BY_A_TENSOR_SPLITS as CLAMP_BY_A_TENSOR_SPLITS
from attn_fuse.torch_internals.tensors import CLAMP_PASSES_AT_ITS_EDGE as CLAMP_PASSES_AT_ITS_EDGE
from attn_fuse.torch_internals.tensors import StorageWeakRef as StorageWeakRef
from attn_fuse.torch_internals.tensors import current_value as current_value
from attn_fuse.torch_internals.tensors import decompositions as decompositions
from attn_fuse.torch_internals.tensors import dispatch_modes_aside as dispatch_modes_aside
from attn_fuse.torch_internals.tensors import functionalized as functionalized
from attn_fuse.torch_internals.tensors import functorch_levels_kept as functorch_levels_kept
from attn_fuse.torch_internals.tensors import innermost as innermost
from attn_fuse.torch_internals.tensors import interval_of_number as interval_of_number
from attn_fuse.torch_internals.tensors import limit_integer as limit_integer
from attn_fuse.torch_internals.tensors import number_ranges as number_ranges
from attn_fuse.torch_internals.tensors import on_fake_tensors as on_fake_tensors
from attn_fuse.torch_internals.tensors import plain_gradients as plain_gradients
from attn_fuse.torch_internals.tensors import saved_tensors_hooks_aside as saved_tensors_hooks_aside
from attn_fuse.torch_internals.tensors import sizes_apart as sizes_apart
from attn_fuse.torch_internals.tensors import storage_of as storage_of

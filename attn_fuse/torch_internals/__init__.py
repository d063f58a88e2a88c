"""Private torch APIs under names that say their purpose. Elsewhere only public names are used.

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

from attn_fuse.torch_internals.dynamo import *  # noqa: F403
from attn_fuse.torch_internals.inductor import *  # noqa: F403
from attn_fuse.torch_internals.kernels import *  # noqa: F403
from attn_fuse.torch_internals.modules import *  # noqa: F403
from attn_fuse.torch_internals.tensors import *  # noqa: F403

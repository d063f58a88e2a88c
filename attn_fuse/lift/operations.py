"""Operations: what each core ATen operation does to element expressions. One handler an operation, in these tables."""

from attn_fuse.lift.creation import CREATION
from attn_fuse.lift.elementwise import ELEMENTWISE
from attn_fuse.lift.layout import LAYOUT
from attn_fuse.lift.reductions import ACROSS
from attn_fuse.lift.written import WRITTEN

OPERATIONS = {**LAYOUT, **WRITTEN, **CREATION, **ELEMENTWISE, **ACROSS}

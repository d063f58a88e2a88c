"""Operations: what each core ATen operation does to element expressions. One handler an operation, in these tables."""

from attn_fuse.operations.across import ACROSS
from attn_fuse.operations.creation import CREATION
from attn_fuse.operations.elementwise import ELEMENTWISE
from attn_fuse.operations.layout import LAYOUT
from attn_fuse.operations.written import WRITTEN

OPERATIONS = {**LAYOUT, **WRITTEN, **CREATION, **ELEMENTWISE, **ACROSS}

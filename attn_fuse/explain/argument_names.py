"""What the names of the arguments of a forward say of them."""

from __future__ import annotations

import re

TOKENS = re.compile(
    r"token|input_ids|^ids?$|idx|text|^src$|^tgt$|^trg$|src_seq|trg_seq|tgt_seq|source|target|caption|inputs?_ids|word|sent"
)
PICTURES = re.compile(r"image|img|pixel|picture|frame|photo|latent|sample")
SOUNDS = re.compile(r"mel|audio|wav|spec|speech|sound")
TIMES = re.compile(r"^t$|^ts$|time_?steps?$|^time$|^steps?$|noise_level|sigma|^times$|timestep")
LABELS = re.compile(r"^y$|label|class|^cond$")
LENGTHS = re.compile(r"len(gth)?s?$")
MARKS = re.compile(r"mark")
CONTEXTS = re.compile(r"context|cond|memory|encoder_(hidden|out)|enc_out|^enc|cross|prompt|query_embed|pos")
CACHES = re.compile(r"^(setup|init|reset|build|create|allocate|make|set)_?\w*cache", re.I)
# Arguments that change what is computed: left out where they may be.
LEFT_OUT = re.compile(r"target|label|loss|past|cache|return|output_|states?$|head_mask|grad")
POSITIONS = re.compile(r"start_pos|input_pos|^pos$|offset|past_len|^step$|cache_pos")

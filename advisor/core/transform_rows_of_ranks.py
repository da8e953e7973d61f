"""Rows of the transforms that are for all ranks of `--gpus N`: part of the table in transform_table.py."""

from __future__ import annotations

from advisor.core.findings import Semantics
from advisor.core.transform_row import Row, Stage

RANKS = (
    Row(
        id="ddp_bucket_views",
        title="gradients as views of DDP's buckets",
        code="ddp:BucketViews",
        stage=Stage.RANKS,
        semantics=Semantics.EXACT,
        needs_gpu=False,
    ),
    Row(
        id="ddp_buckets",
        title="DDP buckets of another size",
        code="ddp:Buckets",
        stage=Stage.RANKS,
        needs_gpu=False,
    ),
    Row(
        id="ddp_static_graph",
        title="DDP's static graph",
        code="ddp:StaticGraph",
        stage=Stage.RANKS,
        needs_gpu=False,
    ),
    Row(
        id="ddp_no_sync",
        title="gradients sent once a step under accumulation",
        code="ddp:SentOnce",
        stage=Stage.RANKS,
        needs_gpu=False,
    ),
    Row(
        id="ddp_bf16_gradients",
        title="gradients sent as bf16",
        code="ddp:SentAsBf16",
        stage=Stage.RANKS,
        semantics=Semantics.PRECISION,
        conflicts=("ddp_fp16_gradients",),
        needs_gpu=False,
    ),
    Row(
        id="ddp_fp16_gradients",
        title="gradients sent as fp16",
        code="ddp:SentAsFp16",
        stage=Stage.RANKS,
        semantics=Semantics.PRECISION,
        conflicts=("ddp_bf16_gradients",),
        needs_gpu=False,
    ),
    Row(
        id="cpu_affinity",
        title="each rank on the cores near its GPU",
        code="cpu_affinity:CpuAffinity",
        stage=Stage.RANKS,
        semantics=Semantics.EXACT,
    ),
    Row(
        id="nccl_settings",
        title="NCCL's settings",
        code="nccl_settings:NcclSettings",
        stage=Stage.RANKS,
        live=False,
    ),
)

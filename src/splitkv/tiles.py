"""The tile: the block of keys that one step of the kernel reads, and the warps that read it.

It fixes bytes of the answer (which products are summed together), so it follows from the geometry and dtypes
alone (at head_dim 576, and in fp8 at 128, from the architecture's shared memory too): never from the batch, the
capacity, the pages, the SM count or a tuned table. Pure integers.
"""

from __future__ import annotations

from dataclasses import dataclass

from .problem import DTYPE_BYTES, KIB, DecodeProblem, DeviceSpec

TENSOR_CORE_ROWS, MAX_BLOCK_ROWS, MAX_F32_ROWS = 16, 64, 8
F32_TILE_BYTES = 8 * KIB
SPARE_BYTES = 16 * KIB
"""Shared memory of a Triton block besides its tiles in flight: the queries, sums between warps, page ids."""
LATENT_HEAD_DIM = 576
MAX_LATENT_ROWS, LATENT_TILE_BYTES = 32, 112 * KIB
"""Absorbed MLA: 32 query vectors beside 1,088 columns fill the registers of eight warps, and 32 keys this much shared
memory; GPUs with less take 16 keys."""


@dataclass(frozen=True)
class TileConfig:
    """How one block works through its keys.

    block_m: query vectors per block (padded). block_n: keys per tile. compute: dtype of both products. These
    and num_warps fix the bytes of the answer; num_stages (tiles in flight) does not, nor do v_in_k_stages, the stages
    more for which there is room where V is part of K and in the same memory.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    compute: str
    v_in_k_stages: int = 0

    @property
    def tile_m(self) -> int:
        """Rows of the products. Tensor cores take 16, so up to 8 query vectors stand there twice, which gives p
        twice the bits (triton_tile.attend_tile)."""
        return self.block_m if self.compute == "f32" or self.block_m >= TENSOR_CORE_ROWS else TENSOR_CORE_ROWS


def compute_dtype(q_dtype: str, kv_dtype: str) -> str:
    """Dtype in which q.k and p.v are multiplied (always summed in f32).

    Keys and values lose nothing to it: fp8 is exact in f16, and an f16 query over bf16 keys and anything with f32 go
    through true f32. A bf16 query over fp8 or f16 keys is exact in f16 from 6e-5 to 65504.
    """
    if q_dtype == "f32":
        return "f32"
    if kv_dtype == "f16" or kv_dtype.startswith("fp8"):
        return "f16"
    return kv_dtype if kv_dtype == q_dtype else "f32"


def tile_keys(problem: DecodeProblem, block_m: int = 1) -> int:
    """Keys per tile, from measurements on an H200 (docs/lab-notes.md, "Tiles").

    16-bit: 32 KiB of K and V (32 keys at head_dim 256, 64 at 128, 128 at 64 and below). fp8: 64 keys, 128 up to
    head_dim 128. f32: 8 KiB of keys, which one warp works through alone, so that nothing waits for another warp;
    half of that for blocks of more than four query vectors, which need the registers.
    """
    dims = padded_dims(problem)
    if compute_dtype(problem.q_dtype, problem.kv_dtype) == "f32":
        tile_bytes = F32_TILE_BYTES // max(block_m // 4, 1)
        keys = tile_bytes // (dims * DTYPE_BYTES["f32"])
        return min(max(power_of_two(keys // 2 + 1), 2), 64)  # the power of two at or below keys
    if problem.kv_dtype.startswith("fp8"):
        return 128 if dims <= 256 else 64
    return 128 if dims <= 128 else 64 if dims <= 256 else 32


def tile_config(problem: DecodeProblem, rows: int, device: DeviceSpec) -> TileConfig:
    """The tile for blocks that serve up to `rows` query vectors of one KV head."""
    compute = compute_dtype(problem.q_dtype, problem.kv_dtype)
    if problem.head_dim == LATENT_HEAD_DIM:
        return _latent_tile(problem, rows, device, compute)
    if compute == "f32":
        block_m = min(power_of_two(rows), MAX_F32_ROWS)
        return TileConfig(block_m, tile_keys(problem, block_m), 1, 4, compute)
    block_m = min(max(power_of_two(rows), TENSOR_CORE_ROWS // 2), MAX_BLOCK_ROWS)
    block_n = tile_keys(problem)
    num_warps = 8 if block_m * power_of_two(problem.v_head_dim) > 32 * 128 else 4
    tile_bytes = block_n * padded_dims(problem) * DTYPE_BYTES[problem.kv_dtype]
    num_stages = 4 if tile_bytes <= 16 * KIB else 3
    if problem.page_size is not None and block_n < 32 * num_warps:
        num_stages = 2 * num_stages - 1  # Triton then gives half of the stages to the loads of the page ids
    return TileConfig(block_m, block_n, num_warps, num_stages, compute)


def _latent_tile(problem: DecodeProblem, rows: int, device: DeviceSpec, compute: str) -> TileConfig:
    """Tiles of 576 + 512 columns: eight warps, and the rows and keys that registers and shared memory hold where V has
    memory of its own (read from the compiled kernels, tests/kernels/test_latent_compile.py)."""
    if compute == "f32":
        return TileConfig(min(power_of_two(rows), MAX_F32_ROWS), 8, 8, 2, compute, 1)
    block_m = min(max(power_of_two(rows), TENSOR_CORE_ROWS // 2), MAX_LATENT_ROWS)
    block_n = 16 if 0 < device.shared_memory_bytes < LATENT_TILE_BYTES else 32
    num_stages, more = (2, 1) if problem.page_size is None else (3, 2)  # as in tile_config
    return TileConfig(block_m, block_n, 8, num_stages, compute, more)


def triton_stages(tile: TileConfig, problem: DecodeProblem, device: DeviceSpec, more_stages: int) -> int:
    """num_stages for `more_stages` tiles in flight beyond the tile's own number, as far as shared memory holds them."""
    if more_stages == 0:
        return tile.num_stages
    per_tile = 2 if problem.page_size is not None and tile.block_n < 32 * tile.num_warps else 1  # as in tile_config
    tile_bytes = tile.block_n * padded_dims(problem) * DTYPE_BYTES[problem.kv_dtype]
    fitting = (device.shared_memory_bytes - SPARE_BYTES) // tile_bytes
    own = -(-tile.num_stages // per_tile)
    return max(min(own + more_stages, max(fitting, own)), 2) * per_tile - (per_tile - 1)


def most_splits_per_block(tile: TileConfig, problem: DecodeProblem) -> int:
    """Splits that a block may join by itself, 1, 4 or 16: every factor of four holds one more set of sums in
    registers, and none may spill (tests/kernels/test_compile.py)."""
    registers = tile.block_m * power_of_two(problem.v_head_dim) // (32 * tile.num_warps)
    if tile.compute == "f32":
        return 4 if registers < 16 else 1
    if problem.kv_dtype.startswith("fp8"):
        return 4 if registers <= 16 else 1
    return 16 if registers <= 16 else 4 if registers <= 32 and tile.block_m <= TENSOR_CORE_ROWS else 1


def padded_dims(problem: DecodeProblem) -> int:
    """Columns of K and V per key as the kernel holds them."""
    return sum(column_blocks(problem.head_dim)) + power_of_two(problem.v_head_dim)


def column_blocks(head_dim: int) -> tuple[int, int]:
    """Powers of two, the first of which holds most columns of K and the second the rest (0: none)."""
    return (512, 64) if head_dim == LATENT_HEAD_DIM else (power_of_two(head_dim), 0)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


CUDA_WARPS, CUDA_COLUMNS, CUDA_MAX_STAGES, CUDA_BLOCKS_PER_SM, CUDA_MAX_DIM = 4, 8, 6, 2, 256
CUDA_CAPABILITY = (8, 0)
WIDE_TILE_KEYS, WIDE_TILE_DIM, WIDE_TILE_MEMORY = 64, 128, 200 * KIB
"""A warp's tile of fp8 at this head_dim, where an SM has so much shared memory: it takes little longer than one of 32
keys, as latency is what a tile costs, and three of them fit for each warp of two blocks."""
CUDA_PAGES_ASKED = 4
"""Page ids that a warp asks for early, with each stage: PAGES_ASKED of cuda_shape.cuh."""
BLOCK_RESERVE_BYTES = KIB
"""Shared memory that the driver keeps for itself per block."""


def runs_on_cuda(problem: DecodeProblem, rows: int, device: DeviceSpec) -> bool:
    """Whether backend "cuda" takes blocks of `rows` query vectors of one KV head. It follows from the geometry, the
    architecture and the installation alone, as the two backends round differently."""
    return device.compiles_cuda and device.capability >= CUDA_CAPABILITY and suits_cuda(problem, rows)


def suits_cuda(problem: DecodeProblem, rows: int) -> bool:
    """As runs_on_cuda, on a GPU that can: one tile of eight columns, or two up to head_dim 128 where products are in
    16 bits; in f32 of keys in f32 alone. More would spill (tests/kernels/test_cuda_compile.py)."""
    dims = max(problem.head_dim, problem.v_head_dim)
    f32 = compute_dtype(problem.q_dtype, problem.kv_dtype) == "f32"
    most = CUDA_COLUMNS if f32 or dims > 128 else 2 * CUDA_COLUMNS
    return (not f32 or problem.kv_dtype == "f32") and dims <= CUDA_MAX_DIM and 0 < rows <= most


def cuda_tile(problem: DecodeProblem, rows: int, device: DeviceSpec) -> TileConfig:
    """The tile of backend "cuda": block_n counts the keys that the block's warps take at once, 8 to 64 each."""
    columns = cuda_columns(rows)
    stages = cuda_shared(problem, rows, device)[0]
    compute = compute_dtype(problem.q_dtype, problem.kv_dtype)
    return TileConfig(columns, CUDA_WARPS * cuda_warp_keys(problem, device), CUDA_WARPS, stages, compute)


def cuda_columns(rows: int) -> int:
    """Of the products, for so many query vectors."""
    return CUDA_COLUMNS if rows <= CUDA_COLUMNS else 2 * CUDA_COLUMNS


def cuda_rows(rows: int) -> int:
    """Query vectors that a block's threads are dealt to: a power of two."""
    return min(1 << (rows - 1).bit_length(), 2 * CUDA_COLUMNS)


def cuda_splits_per_block(tile: TileConfig, problem: DecodeProblem, rows: int) -> int:
    """As most_splits_per_block: sixteen keep one more part in registers than four, for which fp8 at large heads or
    beside two tiles of columns has no room, nor f32 beside more than four query vectors."""
    dims = max(problem.head_dim, problem.v_head_dim)
    if tile.compute == "f32":
        return 4 if rows > 4 and dims > 64 else 16
    return 4 if problem.kv_dtype.startswith("fp8") and (dims > 128 or rows > CUDA_COLUMNS) else 16


def cuda_warp_keys(problem: DecodeProblem, device: DeviceSpec) -> int:
    """Keys of a warp's tile: up to 8 KiB of K, but 32 keys at most, and always in fp8; or WIDE_TILE_KEYS."""
    dims = problem.head_dim, problem.v_head_dim
    if (
        problem.kv_dtype.startswith("fp8")
        and max(dims) == WIDE_TILE_DIM
        and all(WIDE_TILE_DIM % dim == 0 for dim in dims)
    ):
        return WIDE_TILE_KEYS if device.shared_memory_bytes >= WIDE_TILE_MEMORY else 32
    row_bytes = max(dims) * DTYPE_BYTES[problem.kv_dtype]
    return 32 if row_bytes <= 256 else 16 if row_bytes <= 512 else 8


def cuda_shared(
    problem: DecodeProblem,
    rows: int,
    device: DeviceSpec,
    blocks_per_sm: int = CUDA_BLOCKS_PER_SM,
    more_stages: int = 0,
) -> tuple[int, int]:
    """(stages of a warp's ring, bytes): sizeof(Shared) of backends/cuda_shape.cuh, with as many stages as let the
    blocks of an SM share it, up to CUDA_MAX_STAGES and more_stages, or the two that are needed."""
    columns = cuda_columns(rows)
    row_chunks = [dim * DTYPE_BYTES[problem.kv_dtype] // 16 for dim in (problem.head_dim, problem.v_head_dim)]
    keys = cuda_warp_keys(problem, device)
    stage = keys * 16 * max(n | 1 if n % 8 else n for n in row_chunks) + 4 * -(-keys // 32)
    if problem.page_size is not None:
        stage += 4 * CUDA_PAGES_ASKED
    share = (device.shared_memory_bytes + BLOCK_RESERVE_BYTES) // blocks_per_sm - BLOCK_RESERVE_BYTES
    rest = CUDA_WARPS * (8 * columns + 4)
    if problem.kv_dtype == "f32":
        rest += CUDA_WARPS * keys * cuda_rows(rows) * 4
    else:
        rest += columns * problem.head_dim * 2
    part = 4 * -(-(problem.v_head_dim // 4) // (32 * CUDA_WARPS // cuda_rows(rows)))  # of which a thread keeps so much
    if part >= 16:  # registers are short: it is kept here
        rest += 4 * (part + 2) * 32 * CUDA_WARPS
    fitting = (share - rest) // (CUDA_WARPS * stage)
    stages = max(min(fitting, min(fitting, CUDA_MAX_STAGES) + more_stages), 2)
    return stages, -(-(CUDA_WARPS * stages * stage + rest) // 16) * 16

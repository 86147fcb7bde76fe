/* Products of bfloat16 matrices by matrix tiles (AMX), for kernels.c, which includes this. A tile is up to 16 rows of 64
 * bytes. Panels of pairs are what the tile product takes as its second factor: [inputs / 2] rows of 32 outputs, two
 * values each, so that half a panel's rows are a tile's.
 *
 * Tiles belong to the thread, are declared before and released after use, and a process has to ask the system for them.
 */

#include <sys/syscall.h>
#include <unistd.h>

#define TILE_ROWS 16
#define TILE_PAIRS 16 /* pairs of inputs a tile product takes */
#define AHEAD_BYTES 4096
#define ASK_FOR_FEATURE 0x1023
#define TILE_DATA 18
/* Rows whose inputs stay in the second cache while all panels of a part pass by. */
#define ROWS_AT_ONCE 256

/* The compiler does not know that a tile is loaded from memory: what was stored has to be there before. */
#define STORED() __asm__ volatile("" ::: "memory")

static int tiles_allowed;

/* Whether this process may use tiles; asks for it first. */
int32_t allow_tiles(void) {
#ifdef SYS_arch_prctl
    tiles_allowed = !syscall(SYS_arch_prctl, ASK_FOR_FEATURE, TILE_DATA);
#endif
    return tiles_allowed;
}

struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* 0 to 3: sums of the upper and lower rows by the left and right half of a panel; 4, 5: rows; 6, 7: halves. */
static void declare_tiles(int upper, int lower) {
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        int rows = tile >= 6 ? TILE_PAIRS : tile == 2 || tile == 3 || tile == 5 ? lower : upper;
        shapes.rows[tile] = (uint8_t)(rows ? rows : 1), shapes.row_bytes[tile] = 64;
    }
    STORED();
    _tile_loadconfig(&shapes);
}

/* What a step of a product takes of the panel; the processor itself fetches too little ahead for tiles. */
INLINE void fetch_ahead(const bf16 *w) {
    _Pragma("GCC unroll 32") for (int line = 0; line < 2 * TILE_PAIRS; line++) _mm_prefetch((const char *)w + AHEAD_BYTES + 64 * line, _MM_HINT_T0);
}

/* sums [32, WIDTH] = x @ panel for 16 rows of x (or fewer, as declared) and, if `lower`, those from the 17th on. */
INLINE void multiply_tiles(const bf16 *w, const bf16 *x, long stride, long inputs, int lower, const int fetch, float *sums) {
    const long x_bytes = stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        const bf16 *below = x + TILE_ROWS * stride;
        _tile_zero(2);
        _tile_zero(3);
        for (long k = 0; k < inputs; k += 2 * TILE_PAIRS, w += 2 * TILE_PAIRS * WIDTH) {
            if (fetch) fetch_ahead(w);
            _tile_loadd(6, w, 4 * WIDTH);
            _tile_loadd(4, x + k, x_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + WIDTH, 4 * WIDTH);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, below + k, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, sums + TILE_ROWS * WIDTH, 4 * WIDTH);
        _tile_stored(3, sums + TILE_ROWS * WIDTH + LANES, 4 * WIDTH);
    } else {
        for (long k = 0; k < inputs; k += 2 * TILE_PAIRS, w += 2 * TILE_PAIRS * WIDTH) {
            if (fetch) fetch_ahead(w);
            _tile_loadd(4, x + k, x_bytes);
            _tile_loadd(6, w, 4 * WIDTH);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, w + WIDTH, 4 * WIDTH);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, sums, 4 * WIDTH);
    _tile_stored(1, sums + LANES, 4 * WIDTH);
}

/* Even one row is faster by tiles: what counts then is reading the weights. */
INLINE int fills_tiles(long inputs) { return tiles_allowed && inputs % (2 * TILE_PAIRS) == 0; }

/* One panel of outputs for up to ROWS_AT_ONCE rows. `declared` is the shape of the thread's tiles, rows by rows. */
static void panel_tiles(const bf16 *w, const float *bias, const bf16 *all_x, long stride, bf16 *y, long rows, long inputs,
                        long outputs, int count, int *declared) {
    long blocks = (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS);
    for (long block = 0; block < blocks; block++) {
        long first = block * rows / blocks;
        int here = (int)((block + 1) * rows / blocks - first);
        int upper = here < TILE_ROWS ? here : TILE_ROWS, lower = here - upper;
        float sums[2 * TILE_ROWS * WIDTH] __attribute__((aligned(64)));
        if (*declared != here) declare_tiles(upper, lower), *declared = here;
        if (block == 0) multiply_tiles(w, all_x, stride, inputs, lower, 1, sums);
        else multiply_tiles(w, all_x + first * stride, stride, inputs, lower, 0, sums);
        if (count < WIDTH) {
            put_bf16(sums, here, y + first * outputs, outputs, count, bias);
            continue;
        }
        __m512 left = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
        __m512 right = bias ? _mm512_loadu_ps(bias + LANES) : _mm512_setzero_ps();
        for (int r = 0; r < here; r++) {
            __m512 low = _mm512_add_ps(_mm512_load_ps(sums + r * WIDTH), left);
            __m512 high = _mm512_add_ps(_mm512_load_ps(sums + r * WIDTH + LANES), right);
            _mm512_storeu_si512(y + (first + r) * outputs, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/* All panels of a part, for some rows at a time. */
static void panels_by_tiles(const struct linear *l, long first_panel, long last_panel) {
    int declared = 0;
    for (long row = 0; row < l->rows; row += ROWS_AT_ONCE) {
        long rows = l->rows - row < ROWS_AT_ONCE ? l->rows - row : ROWS_AT_ONCE;
        for (long panel = first_panel; panel < last_panel; panel++) {
            long first = panel * WIDTH, left = l->outputs - first;
            panel_tiles((const bf16 *)l->weight + first * l->inputs, l->bias ? l->bias + first : 0,
                        (const bf16 *)l->x + row * l->stride, l->stride, (bf16 *)l->y + row * l->outputs + first, rows,
                        l->inputs, l->outputs, (int)(left < WIDTH ? left : WIDTH), &declared);
        }
    }
    _tile_release();
}

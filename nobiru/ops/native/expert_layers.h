/* The experts of a layer, both products and what is between them in one call, for kernels.c, which includes this. Products
 * are those of encoder_layers.h.
 *
 * Rows are sorted by expert, each goes through its own: down(silu(gate) * up). Many rows of an expert are cut into blocks,
 * which pass through both products on one thread; few share what they read of the weights.
 */

#define FEW_ROWS 96

/* silu(gates) * ups of some panels of each; m's outputs are all gates, then all ups. */
static void project_gated(const struct matrix *m, const struct inputs *in, long rows, int is_half, char *values,
                          long first_panel, long last_panel, struct upcoming then) {
    float gates[32 * WIDTH] __attribute__((aligned(64))), ups[32 * WIDTH] __attribute__((aligned(64)));
    const long size = m->outputs / 2, blocks = num_blocks(m, rows), to_ups = size / WIDTH;
    float *wide = room_to_widen(m, blocks, 2);
    for (long panel = first_panel; panel < last_panel; panel++) {
        const struct panel gate_panel = open_panel(m, panel, wide);
        const struct panel up_panel = open_panel(m, panel + to_ups, wide ? wide + m->inputs * WIDTH : 0);
        const char *next = panel_at(m, panel + 1), *next_ups = panel_at(m, panel + 1 + to_ups);
        if (panel + 1 == last_panel && then.first) {
            next = then.first;
            next_ups = then.ups ? then.ups : next + panel_bytes(m);
        }
        vec of_gates[2] = {{0}, {0}}, of_ups[2] = {{0}, {0}};
        for (int half = 0; m->bias && half < 2; half++) {
            of_gates[half] = load_f32(m->bias + panel * WIDTH + half * LANES);
            of_ups[half] = load_f32(m->bias + size + panel * WIDTH + half * LANES);
        }
        for (long number = 0; number < blocks; number++) {
            const struct block b = find_block(m, number, blocks, rows);
            const char *x = in->rows + b.row * in->stride;
            multiply_panel(gate_panel.by, gate_panel.weights, x, in->stride, b.rows, m->inputs,
                           fetch_of(m, next, number, blocks), gates);
            multiply_panel(up_panel.by, up_panel.weights, x, in->stride, b.rows, m->inputs,
                           fetch_of(m, next_ups, number, blocks), ups);
            for (int r = 0; r < b.rows; r++)
                UNROLL for (int half = 0; half < 2; half++) {
                    vec gate = load_f32(gates + r * WIDTH + half * LANES) + of_gates[half];
                    vec up = load_f32(ups + r * WIDTH + half * LANES) + of_ups[half];
                    set(is_half, values, (b.row + r) * size + panel * WIDTH + half * LANES, activate(SILU, !is_half, gate) * up);
                }
        }
    }
}

/* Where a shared product by m begins for one of the threads. */
static struct upcoming behind_last(const struct matrix *m, long thread, long threads) {
    return (struct upcoming){panel_at(m, thread * panels_at_once(m->outputs / WIDTH, threads)), 0};
}

struct experts {
    struct matrix gate_up, down; /* of slot 0 */
    const int64_t *slots, *starts; /* group g is rows starts[g] to starts[g + 1], by slot slots[g] */
    const char *rows;              /* [rows, inputs of gate_up] */
    char *out;                     /* [rows, outputs of down], perhaps in the place of rows */
    long groups, slot_bytes, threads;
    int is_half, uses_tiles, failed;
    const struct matrix *then; /* what rows go through next; or 0 */
    char *inner, *inputs;      /* of all rows, where they are few */
    long parts_each, rows_each;
};

INLINE struct matrix of_slot(const struct experts *e, const struct matrix *first, long group) {
    struct matrix m = *first;
    m.panels = (const char *)m.panels + e->slots[group] * e->slot_bytes;
    return m;
}

INLINE long expert_row(const struct experts *e, long values) { return values * value_bytes(e->is_half); }

/* A block of one group's rows through both products. */
static void expert_block(void *arguments, long part) {
    struct experts *e = arguments;
    long group = 0, first, end;
    for (;; group++) { /* parts of a group follow each other */
        const long rows = e->starts[group + 1] - e->starts[group], parts = (rows + e->rows_each - 1) / e->rows_each;
        if (part < parts) {
            first = e->starts[group] + part * rows / parts, end = e->starts[group] + (part + 1) * rows / parts;
            break;
        }
        part -= parts;
    }
    const long rows = end - first, width = e->gate_up.inputs, inner = e->down.inputs;
    const long of_inputs = up_to(rows, 32) * expert_row(e, inner > width ? inner : width);
    char *memory = space(SPACE_OF_PART, of_inputs + rows * expert_row(e, inner));
    if (!memory) {
        e->failed = 1;
        return;
    }
    const struct matrix gate_up = of_slot(e, &e->gate_up, group), down = of_slot(e, &e->down, group);
    struct finish to = {.is_half = e->is_half, .values = e->out + first * expert_row(e, down.outputs)};
    begin_pairs(e->uses_tiles);
    struct inputs in = inputs_of((int)gate_up.by, e->is_half, e->rows + first * expert_row(e, width), rows, width, memory);
    project_gated(&gate_up, &in, rows, e->is_half, memory + of_inputs, 0, inner / WIDTH, (struct upcoming){0});
    in = inputs_of((int)down.by, e->is_half, memory + of_inputs, rows, inner, memory);
    project(&down, &in, rows, &to);
    end_pairs(e->uses_tiles);
}

/* The weights of one part of a product: those of a group, and which of their panels. */
struct expert_part {
    struct matrix m;
    long group, first, last;
};
static struct expert_part find_expert_part(const struct experts *e, long part, int gates) {
    struct expert_part p = {.group = part / e->parts_each};
    p.m = of_slot(e, gates ? &e->gate_up : &e->down, p.group);
    const long panels = (gates ? p.m.outputs / 2 : p.m.outputs) / WIDTH, number = part % e->parts_each;
    p.first = number * panels / e->parts_each, p.last = (number + 1) * panels / e->parts_each;
    return p;
}

/* Of the part that this thread takes behind one, if all threads are equally fast. */
static struct upcoming behind_expert_part(const struct experts *e, long part, int gates) {
    const long next = part + e->threads, parts = e->groups * e->parts_each, left = next - parts;
    if (left >= parts) return (struct upcoming){0};
    if (left >= 0 && !gates) return e->then ? behind_last(e->then, left, e->threads) : (struct upcoming){0};
    const struct expert_part p = find_expert_part(e, left < 0 ? next : left, gates && left < 0);
    const char *first = panel_at(&p.m, p.first);
    return (struct upcoming){first, gates && left < 0 ? panel_at(&p.m, p.first + p.m.outputs / 2 / WIDTH) : 0};
}

/* Some panels of one product for all rows of a group; of the first if `gates`, else of the second. */
static void expert_panels(struct experts *e, long part, int gates) {
    const struct expert_part own = find_expert_part(e, part, gates);
    const struct matrix m = own.m;
    const long group = own.group, start = e->starts[group], rows = e->starts[group + 1] - start;
    const struct upcoming then = behind_expert_part(e, part, gates);
    const long row = expert_row(e, m.inputs);
    /* Where rows have to lie as tiles they were arranged before, each group's from a whole tile on. */
    const char *x = is_tiled((int)m.by) ? e->inputs + (start + 32 * group) * row : (gates ? e->rows : e->inner) + start * row;
    struct inputs in = {x, row, 0, 0};
    begin_pairs(e->uses_tiles);
    if (gates) {
        project_gated(&m, &in, rows, e->is_half, e->inner + start * expert_row(e, e->down.inputs), own.first, own.last,
                      then);
    } else {
        struct finish to = {.is_half = e->is_half, .values = e->out + start * expert_row(e, m.outputs)};
        project_panels(&m, &in, rows, &to, own.first, own.last, then);
    }
    end_pairs(e->uses_tiles);
}
static void expert_gates_part(void *arguments, long part) { expert_panels(arguments, part, 1); }
static void expert_downs_part(void *arguments, long part) { expert_panels(arguments, part, 0); }

static void arrange_groups(const struct experts *e, const struct matrix *m, const char *rows) {
    if (!is_tiled((int)m->by)) return;
    const long row = expert_row(e, m->inputs);
    for (long group = 0; group < e->groups; group++) {
        const long start = e->starts[group];
        inputs_of((int)m->by, e->is_half, rows + start * row, e->starts[group + 1] - start, m->inputs,
                  e->inputs + (start + 32 * group) * row);
    }
}

void compute_experts(struct experts *e) {
    const long rows = e->starts[e->groups], inner = e->down.inputs, width = e->gate_up.inputs;
    if (rows >= FEW_ROWS * e->groups) {
        const long each = (rows + e->threads * MOST_ROWS - 1) / (e->threads * MOST_ROWS) * e->threads;
        long parts = 0;
        e->rows_each = (rows + each - 1) / each;
        for (long group = 0; group < e->groups; group++)
            parts += (e->starts[group + 1] - e->starts[group] + e->rows_each - 1) / e->rows_each;
        in_parallel(expert_block, e, parts, (int)e->threads);
        return;
    }
    const long of_inner = up_to(rows * expert_row(e, inner), 64);
    e->inner = space(SPACE_OF_EXPERTS, of_inner + (rows + 32 * e->groups) * expert_row(e, inner > width ? inner : width));
    if (!e->inner) {
        e->failed = 1;
        return;
    }
    e->inputs = e->inner + of_inner;
    e->parts_each = (24 * e->threads + e->groups - 1) / e->groups;
    arrange_groups(e, &e->gate_up, e->rows);
    in_parallel(expert_gates_part, e, e->groups * e->parts_each, (int)e->threads);
    arrange_groups(e, &e->down, e->inner);
    in_parallel(expert_downs_part, e, e->groups * e->parts_each, (int)e->threads);
}

{# Included by paged_attention_decode with TEAM: a workgroup, of as many lanes as a split has tokens, has HEADS heads of one KV head
   of one (sequence, split). First a lane has a token: it loads the key once for all heads. Then a lane has a part of the value's
   row and every so many-th token: values are loaded once for all heads too, side by side by neighbouring lanes. All sums run
   in an order that the shape alone decides. #}
{% include "cached_row.wgsl" %}
{% set COLUMNS = HEAD_DIM // 16 if KV == "q8_0" else HEAD_DIM // 8 %}
{# vec4<f32> of a column, and lanes that share its tokens. #}
{% set WIDTH = 4 if KV == "q8_0" else 2 %}
{% set SHARES = SPLIT // COLUMNS %}
// [head][values / 4], [head][token]: scores, then weights, and a vec4 of a column by [lane][part].
var<workgroup> queries: array<vec4<f32>, {{ HEADS * HEAD_DIM // 4 }}>;
var<workgroup> weights: array<f32, {{ HEADS * SPLIT }}>;
var<workgroup> maxima: array<f32, {{ HEADS }}>;
var<workgroup> columns: array<vec4<f32>, {{ SPLIT * WIDTH }}>;

{% include "score.wgsl" %}

fn scores_of(row: Row, token: u32) {
    {% set SHARE = 0 %}
    {% set CACHE = "key_cache" %}
    {% set NAME = "k" %}
    {% include "load_row.wgsl" %}
    {% for h in range(HEADS) %}
    var products{{ h }} = vec4<f32>(0.0);
    {% endfor %}
    {% for i in range(HEAD_DIM // 4) %}
    {% for h in range(HEADS) %}
    products{{ h }} = fma(queries[{{ h * HEAD_DIM // 4 + i }}u], k{{ i }}, products{{ h }});
    {% endfor %}
    {% endfor %}
    {% for h in range(HEADS) %}
    weights[{{ h * SPLIT }}u + token] = capped(products{{ h }});
    {% endfor %}
}

@compute @workgroup_size(SPLIT)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let num_groups = params.num_heads / {{ HEADS }}u;
    let index = workgroup.y * params.row_width + workgroup.x;
    // The last row of the grid may be longer than what is left: such a workgroup does what the last one does.
    let item = min(index, params.num_splits * num_groups - 1u) / num_groups;
    let head = (min(index, params.num_splits * num_groups - 1u) - item * num_groups) * {{ HEADS }}u;
    let sequence = splits[item].x;
    let context_len = context_lens[sequence];
    let start = splits[item].y * SPLIT;
    // A split before the window leaves nothing, which weighs nothing in the merge.
    let first = max(start, first_token(context_len - 1u));
    let last = min(start + SPLIT, context_len);
    let kv_head = head / (params.num_heads / params.num_kv_heads);
    let table_base = sequence * params.block_table_stride;
    for (var i = lane; i < {{ HEADS * HEAD_DIM // 4 }}u; i += SPLIT) {
        queries[i] = query[(sequence * params.num_heads + head) * HEAD_DIM4 + i] * params.scale;
    }
    workgroupBarrier();
    let token = start + lane;
    let is_seen = token >= first && token < last;
    if (is_seen) {
        scores_of(row_of(table_base, token, kv_head), lane);
    } else {
        {% for h in range(HEADS) %}
        weights[{{ h * SPLIT }}u + lane] = LOWEST;
        {% endfor %}
    }
    workgroupBarrier();
    if (lane < {{ HEADS }}u) {
        var largest = LOWEST;
        for (var t = 0u; t < SPLIT; t++) {
            largest = max(largest, weights[lane * SPLIT + t]);
        }
        maxima[lane] = largest;
    }
    workgroupBarrier();
    {% for h in range(HEADS) %}
    weights[{{ h * SPLIT }}u + lane] = select(0.0, exp(weights[{{ h * SPLIT }}u + lane] - maxima[{{ h }}]), is_seen);
    {% endfor %}
    workgroupBarrier();
    let target_base = (item * params.num_heads + head) * (HEAD_DIM4 + 1u);
    if (lane < {{ HEADS }}u) {
        var sum = 0.0;
        for (var t = 0u; t < SPLIT; t++) {
            sum += weights[lane * SPLIT + t];
        }
        partials[target_base + lane * (HEAD_DIM4 + 1u) + HEAD_DIM4] = vec4<f32>(maxima[lane], sum, 0.0, 0.0);
    }
    let column = lane % {{ COLUMNS }}u;
    let share = lane / {{ COLUMNS }}u;
    {% for h in range(HEADS) %}
    {% for w in range(WIDTH) %}
    var sum{{ h }}_{{ w }} = vec4<f32>(0.0);
    {% endfor %}
    {% endfor %}
    if (share < {{ SHARES }}u) {
        for (var t = first + share; t < last; t += {{ SHARES }}u) {
            let row = row_of(table_base, t, kv_head);
            let words = value_cache[row.values + column];
            {% if KV == "q8_0" %}
            let scale_word = row.scales + column / 4u;
            let scales = unpack2x16float(value_cache[scale_word >> 2u][scale_word & 3u]);
            let scale = select(scales.x, scales.y, column % 4u >= 2u);
            {% for c in ["x", "y", "z", "w"] %}
            let v{{ loop.index0 }} = vec4<f32>(unpack4xI8(words.{{ c }})) * scale;
            {% endfor %}
            {% else %}
            let v0 = halves(words.x, words.y);
            let v1 = halves(words.z, words.w);
            {% endif %}
            {% for h in range(HEADS) %}
            {
                let weight = vec4<f32>(weights[{{ h * SPLIT }}u + t - start]);
                {% for w in range(WIDTH) %}
                sum{{ h }}_{{ w }} = fma(weight, v{{ w }}, sum{{ h }}_{{ w }});
                {% endfor %}
            }
            {% endfor %}
        }
    }
    {% for h in range(HEADS) %}
    {% for w in range(WIDTH) %}
    columns[lane * {{ WIDTH }}u + {{ w }}u] = sum{{ h }}_{{ w }};
    {% endfor %}
    workgroupBarrier();
    for (var i = lane; i < HEAD_DIM4; i += SPLIT) {
        var sum = vec4<f32>(0.0);
        for (var s = 0u; s < {{ SHARES }}u; s++) {
            sum += columns[s * HEAD_DIM4 + i];
        }
        partials[target_base + {{ h }}u * (HEAD_DIM4 + 1u) + i] = sum;
    }
    workgroupBarrier();
    {% endfor %}
}

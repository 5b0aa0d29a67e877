{# Included by both attention kernels: one query head in registers, and `attend(slot)` which folds one cached token into
   the running softmax (Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018). #}
fn halves(low: u32, high: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(low), unpack2x16float(high));
}

{% for i in range(HEAD_DIM // 4) %}
var<private> q{{ i }}: vec4<f32>;
var<private> acc{{ i }}: vec4<f32>;
{% endfor %}
var<private> score_max: f32;
var<private> weight_sum: f32;

fn begin(query_base: u32) {
    {% for i in range(HEAD_DIM // 4) %}
    q{{ i }} = query[query_base + {{ i }}u] * params.scale;
    acc{{ i }} = vec4<f32>(0.0);
    {% endfor %}
    score_max = LOWEST;
    weight_sum = 0.0;
}

// Index of the first vec4<u32> of `token`'s head in either cache.
fn slot_base(table_base: u32, token: u32, kv_head: u32) -> u32 {
    let block_id = block_tables[table_base + token / BLOCK_SIZE];
    return ((block_id * params.num_kv_heads + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE) * {{ HEAD_DIM // 8 }}u;
}

fn score_of(base: u32) -> f32 {
    var products = vec4<f32>(0.0);
    {% for i in range(HEAD_DIM // 8) %}
    {
        let k = key_cache[base + {{ i }}u];
        products = fma(q{{ 2 * i }}, halves(k.x, k.y), products);
        products = fma(q{{ 2 * i + 1 }}, halves(k.z, k.w), products);
    }
    {% endfor %}
    let score = (products.x + products.y) + (products.z + products.w);
    if (params.soft_cap > 0.0) {
        // cap * tanh(score / cap)
        return params.soft_cap * (1.0 - 2.0 / (exp(2.0 * score / params.soft_cap) + 1.0));
    }
    return score;
}

// The first token that the query at `position` sees.
fn first_token(position: u32) -> u32 {
    return select(0u, position + 1u - min(params.window, position + 1u), params.window > 0u);
}

fn attend(base: u32, score: f32) {
    if (score > score_max) {
        let shrink = exp(score_max - score);
        {% for i in range(HEAD_DIM // 4) %}
        acc{{ i }} *= shrink;
        {% endfor %}
        weight_sum *= shrink;
        score_max = score;
    }
    let weight = exp(score - score_max);
    weight_sum += weight;
    {% for i in range(HEAD_DIM // 8) %}
    {
        let v = value_cache[base + {{ i }}u];
        acc{{ 2 * i }} = fma(vec4<f32>(weight), halves(v.x, v.y), acc{{ 2 * i }});
        acc{{ 2 * i + 1 }} = fma(vec4<f32>(weight), halves(v.z, v.w), acc{{ 2 * i + 1 }});
    }
    {% endfor %}
}

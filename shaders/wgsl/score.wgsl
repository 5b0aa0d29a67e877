{# Included by the attention kernels: a score from its products, and which tokens a query sees. Uses `params` of the including
   shader. #}
fn capped(products: vec4<f32>) -> f32 {
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

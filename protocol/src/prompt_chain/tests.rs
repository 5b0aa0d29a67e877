//! Golden values, and: equal prefixes of content are equal prefixes of chains, unequal ones are not.

use serde_json::{Map, json};

use super::*;

const ROOT: ChainRoot<'_> = ChainRoot::new(ChainKind::Chat, "m");

fn chain(root: &ChainRoot<'_>, messages: &[(&str, &str)]) -> Vec<u64> {
    let mut chain = PromptChain::new(root);
    messages.iter().for_each(|(role, content)| chain.push_message(role, content, Map::new().iter()));
    chain.chunks().iter().map(|chunk| chunk.hash).collect()
}

fn shared(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn golden_values() {
    // By Python's `xxhash`: tests/golden/make_prompt_chain.py prints them.
    let long = "x".repeat(300);
    assert_eq!(
        chain(&ROOT, &[("system", "You help."), ("user", &long), ("assistant", "")]),
        [0x894c_83e0_5a4e_02fb, 0x7611_d192_297a_0f69, 0x6679_d73d_9394_9e11, 0x2c8b_58c0_81ca_fa9d]
    );
    let mut ids = PromptChain::new(&ChainRoot { kind: ChainKind::TokenIds, ..ROOT });
    ids.push_token_ids(&(0..65).collect::<Vec<u32>>());
    assert_eq!(
        ids.chunks().iter().map(|chunk| chunk.hash).collect::<Vec<_>>(),
        [0xb78e_6879_92bb_c5e5, 0x8aae_f7d9_153f_cf1f]
    );
    let mut tools = PromptChain::new(&ChainRoot { tools: Some(&json!([{ "b": 1, "a": "ü" }])), ..ROOT });
    tools.push_message("assistant", "", json!({ "name": "n", "calls": [1.5, null] }).as_object().unwrap().iter());
    assert_eq!(tools.chunks()[0].hash, 0x4be8_c85d_1210_eac0);
}

#[test]
fn a_shared_prefix_of_content_is_one_of_chains_and_ends_where_content_does() {
    let text = |len: usize, last: char| format!("{}{last}", "a".repeat(len - 1));
    let base = chain(&ROOT, &[("system", "s"), ("user", &text(1000, 'x'))]);
    assert_eq!(base.len(), 5);
    let other_end = chain(&ROOT, &[("system", "s"), ("user", &text(1000, 'y'))]);
    assert_eq!(shared(&base, &other_end), 4);
    let longer = chain(&ROOT, &[("system", "s"), ("user", &text(1000, 'x')), ("assistant", "b")]);
    assert_eq!((shared(&base, &longer), longer.len()), (5, 6));
    assert_eq!(shared(&base, &chain(&ROOT, &[("user", "s"), ("user", &text(1000, 'x'))])), 0, "another role");
    // The same bytes, parted otherwise into messages.
    assert_eq!(shared(&chain(&ROOT, &[("user", "ab")]), &chain(&ROOT, &[("user", "a"), ("user", "b")])), 0);
    assert_eq!(base, chain(&ROOT, &[("developer", "s"), ("user", &text(1000, 'x'))]));
}

#[test]
fn whatever_decides_how_content_becomes_tokens_is_in_the_root() {
    let (tools, none) = (json!([{ "type": "function" }]), json!([]));
    let roots = [
        ROOT,
        ChainRoot { kind: ChainKind::Text, ..ROOT },
        ChainRoot { model: "n", ..ROOT },
        ChainRoot { adapter: "m", ..ROOT },
        ChainRoot { cache_salt: "t", ..ROOT },
        ChainRoot { tools: Some(&tools), ..ROOT },
        ChainRoot { template_arguments: Some(&tools), ..ROOT },
    ];
    let firsts: std::collections::BTreeSet<u64> = roots.iter().map(|root| chain(root, &[("user", "a")])[0]).collect();
    assert_eq!(firsts.len(), roots.len());
    assert_eq!(chain(&ChainRoot { tools: Some(&none), ..ROOT }, &[("user", "a")]), chain(&ROOT, &[("user", "a")]));
}

#[test]
fn what_a_message_has_beside_text_counts_in_any_order() {
    let one = |rest: Value| {
        let mut chain = PromptChain::new(&ROOT);
        chain.push_message("tool", "42", rest.as_object().unwrap().iter());
        chain.chunks()[0].hash
    };
    let call = one(json!({ "tool_call_id": "c", "name": { "y": 1, "x": [2] } }));
    assert_eq!(call, one(json!({ "name": { "x": [2], "y": 1 }, "tool_call_id": "c" })));
    assert_ne!(call, one(json!({ "tool_call_id": "d", "name": { "y": 1, "x": [2] } })));
    assert_ne!(call, one(json!({})));
}

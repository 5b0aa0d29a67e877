//! A chat template of any text: refused with a reason, or rendered within its steps, without a crash.

use engine::chat_template::ChatTemplate;

pub fn check(bytes: &[u8]) {
    let Ok(source) = std::str::from_utf8(bytes) else { return };
    let Ok(template) = ChatTemplate::parse(source, "<s>".into(), "</s>".into()) else { return };
    let messages = serde_json::json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": "Hello" },
        { "role": "assistant", "content": [{ "type": "text", "text": "Hi" }] },
    ]);
    drop(template.render(&messages, true));
    drop(template.render(&serde_json::Value::Null, false));
}

//! The chat template of a model file: messages to the text that the model was trained on.
//!
//! Parsed once at start, rendered by the HTTP edge. Jinja by minijinja with Hugging Face's settings (block tags take
//! their line with them) and Python's string methods. Rendering is bounded in steps; a template comes with the model and is
//! trusted with memory as far as the weights are.

use std::path::PathBuf;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};

use crate::error::LoadError;
use crate::model_file::{ModelFile, Value as MetaValue};
use crate::tokenizer::Tokenizer;

/// Steps that one rendering may take.
const FUEL: u64 = 10_000_000;
const NAME: &str = "chat_template";

/// A parsed template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

/// A template that refused the messages.
#[derive(Debug, thiserror::Error)]
#[error("the model's chat template refused the messages: {0}")]
pub struct RenderError(String);

impl ChatTemplate {
    /// The template of a file; `None` where it has none.
    ///
    /// # Errors
    /// When the template does not parse.
    pub fn of(file: &ModelFile, tokenizer: &Tokenizer) -> Result<Option<Self>, LoadError> {
        let key = "tokenizer.chat_template";
        let Some(source) = file.optional(key, "a string", MetaValue::as_str)? else { return Ok(None) };
        let text = |id: Option<u32>| id.map_or_else(String::new, |id| tokenizer.decode(&[id]));
        let eos = file.optional("tokenizer.ggml.eos_token_id", "an integer", MetaValue::as_u64)?;
        let named = file.get("tokenizer.eos_token").and_then(MetaValue::as_str).map(str::to_owned);
        let eos = named.unwrap_or_else(|| text(eos.map(|id| id as u32)));
        Self::parse(source, text(tokenizer.bos_token_id()), eos)
            .map(Some)
            .map_err(|error| LoadError::ChatTemplate { path: PathBuf::from(file.path()), reason: describe(&error) })
    }

    /// A template for a model that has none of its own: each message behind its role, a line each.
    ///
    /// # Errors
    /// Never, since its source is fixed.
    pub fn plain() -> Result<Self, LoadError> {
        const SOURCE: &str = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
        let fail = |error: Error| LoadError::ChatTemplate { path: PathBuf::new(), reason: describe(&error) };
        Self::parse(SOURCE, String::new(), String::new()).map_err(fail)
    }

    /// A template from its source, and the texts of the tokens that begin and end a text.
    ///
    /// # Errors
    /// When it does not parse.
    pub fn parse(source: &str, bos_token: String, eos_token: String) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_fuel(Some(FUEL));
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, source.to_owned())?;
        Ok(Self { environment, bos_token, eos_token })
    }

    /// The prompt of a conversation. `messages` are objects with at least `role` and `content`.
    ///
    /// # Errors
    /// When the template refuses the messages, by its own words.
    pub fn render(&self, messages: &serde_json::Value, add_generation_prompt: bool) -> Result<String, RenderError> {
        let template = self.environment.get_template(NAME).map_err(|error| RenderError(describe(&error)))?;
        template
            .render(context! {
                messages => Value::from(Serde(messages)),
                add_generation_prompt,
                bos_token => self.bos_token.as_str(),
                eos_token => self.eos_token.as_str(),
            })
            .map_err(|error| RenderError(describe(&error)))
    }
}

fn describe(error: &Error) -> String {
    let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
    format!("{error}{line}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, messages: &serde_json::Value) -> Result<String, String> {
        let template = ChatTemplate::parse(source, "<s>".into(), "</s>".into()).map_err(|error| error.to_string())?;
        template.render(messages, true).map_err(|error| error.to_string())
    }

    #[test]
    fn block_tags_take_their_line_and_python_methods_work() {
        let source = "{{ bos_token }}{% for m in messages %}\n{{ m['content'].strip() }}\n{% endfor %}\n";
        let text = render(source, &json!([{ "role": "user", "content": " a " }, { "role": "user", "content": "b" }]));
        assert_eq!(text.unwrap(), "<s>a\nb\n");
    }

    #[test]
    fn a_template_can_refuse() {
        let error = render("{{ raise_exception('roles must alternate') }}", &json!([])).unwrap_err();
        assert!(error.contains("roles must alternate"), "{error}");
    }

    #[test]
    fn an_endless_template_runs_out_of_fuel() {
        let source = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
        assert!(render(source, &json!([])).unwrap_err().contains("fuel"));
    }
}

//! Fills a shader's placeholders. Called by the engine when it builds a pipeline, and by the tests for every variant.
//!
//! Templates are minijinja: `{{ NAME }}`, `{% for %}` to unroll by hand (naga emits every WGSL loop as `loop`), `{% if %}`
//! by weight format, `{% include %}` for a shared part. A missing or an unknown placeholder is an error.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, UndefinedBehavior};
use std::collections::BTreeMap;

use crate::{Binding, INCLUDES, Shader};

/// What a placeholder stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// A count or a size.
    Number(u32),
    /// A name, such as a weight format.
    Word(&'static str),
}

/// A shader with all its placeholders filled: what a pipeline is built from, and its cache key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// The kernel.
    pub shader: &'static Shader,
    /// Placeholder values by name.
    pub values: BTreeMap<&'static str, Value>,
}

/// A template that could not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The values given are not those that the shader declares.
    #[error("{shader}: placeholders are {declared:?}, values were given for {given:?}")]
    Placeholders {
        /// The kernel.
        shader: &'static str,
        /// What it declares.
        declared: Vec<&'static str>,
        /// What the variant gives.
        given: Vec<&'static str>,
    },
    /// The template text itself failed.
    #[error("{shader}: {source}")]
    Render {
        /// The kernel.
        shader: &'static str,
        /// minijinja's message with the line.
        source: minijinja::Error,
    },
}

impl Variant {
    /// A variant of `shader` with these placeholder values.
    pub fn new(shader: &'static Shader, values: &[(&'static str, Value)]) -> Self {
        Self { shader, values: values.iter().copied().collect() }
    }

    /// `name[KEY=value,..]`, for messages and tests.
    pub fn label(&self) -> String {
        let values: Vec<String> = self
            .values
            .iter()
            .map(|(name, value)| match value {
                Value::Number(n) => format!("{name}={n}"),
                Value::Word(word) => format!("{name}={word}"),
            })
            .collect();
        format!("{}[{}]", self.shader.name, values.join(","))
    }

    /// How this variant uses the binding of this number.
    pub fn binding(&self, index: usize) -> Binding {
        match self.shader.bindings[index] {
            Binding::Weights(_) if self.values.get("IMAGE") != Some(&Value::Number(1)) => Binding::Read,
            binding => binding,
        }
    }

    /// Whether the kernel needs subgroup operations.
    pub fn needs_subgroups(&self) -> bool {
        self.values.get("SHARE") == Some(&Value::Number(1))
            || matches!(self.values.get("SUM"), Some(Value::Word("subgroup" | "subgroups")))
            || self.needs_matrices()
    }

    /// Whether the kernel needs numbers of half precision.
    pub fn needs_f16(&self) -> bool {
        matches!(self.values.get("ARITHMETIC"), Some(Value::Word(word)) if *word != "f32")
    }

    /// Whether the kernel needs cooperative matrices.
    pub fn needs_matrices(&self) -> bool {
        matches!(self.values.get("ARITHMETIC"), Some(Value::Word("matrix8" | "matrix16")))
    }

    /// The WGSL text.
    ///
    /// # Errors
    /// When a placeholder is missing or unknown, or the template does not parse.
    pub fn render(&self) -> Result<String, TemplateError> {
        let mut declared = self.shader.placeholders.to_vec();
        declared.sort_unstable();
        let given: Vec<&'static str> = self.values.keys().copied().collect();
        if declared != given {
            return Err(TemplateError::Placeholders { shader: self.shader.name, declared, given });
        }
        self.fill().map_err(|source| TemplateError::Render { shader: self.shader.name, source })
    }

    fn fill(&self) -> Result<String, minijinja::Error> {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        for (name, source) in INCLUDES {
            environment.add_template(name, source)?;
        }
        environment.add_template(self.shader.name, self.shader.source)?;
        let context: BTreeMap<&str, minijinja::Value> = self
            .values
            .iter()
            .map(|(name, value)| {
                let value = match value {
                    Value::Number(n) => minijinja::Value::from(*n),
                    Value::Word(word) => minijinja::Value::from(*word),
                };
                (*name, value)
            })
            .collect();
        environment.get_template(self.shader.name)?.render(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_unknown_placeholders_are_errors() {
        let missing = Variant::new(&crate::ARGMAX, &[]).render().unwrap_err().to_string();
        assert!(missing.contains("argmax") && missing.contains("WORKGROUP_SIZE"), "{missing}");
        let unknown = [("WORKGROUP_SIZE", Value::Number(64)), ("COLOUR", Value::Word("red"))];
        let unknown = Variant::new(&crate::ARGMAX, &unknown).render().unwrap_err().to_string();
        assert!(unknown.contains("COLOUR"), "{unknown}");
    }
}

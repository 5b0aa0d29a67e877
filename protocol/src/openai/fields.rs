//! Typed access to a JSON object's fields, with errors that name the field and show its value.

use serde_json::{Map, Value};

/// What is wrong with one field of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{param}`: {message}")]
pub struct FieldError {
    /// The field, as a path.
    pub param: String,
    /// What is wrong, with the value.
    pub message: String,
}

impl FieldError {
    /// An error of `param`.
    pub fn new(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: param.into(), message: message.into() }
    }
}

/// A request's object. `null` counts as absent, as OpenAI's clients send it.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    object: &'a Map<String, Value>,
}

/// A value in a message, cut where it is long: requests hold whole documents.
pub(super) fn shown(value: &Value) -> String {
    const MAX_CHARS: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

fn wrong_type(param: &str, expected: &str, value: &Value) -> FieldError {
    FieldError::new(param, format!("expected {expected}, got {}", shown(value)))
}

impl<'a> Fields<'a> {
    /// The fields of a request body.
    ///
    /// # Errors
    /// When it is not an object.
    pub fn of(body: &'a Value) -> Result<Self, FieldError> {
        body.as_object().map(|object| Self { object }).ok_or_else(|| wrong_type("body", "a JSON object", body))
    }

    /// The raw value, unless absent or null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        as_type: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, FieldError> {
        self.get(name).map(|value| as_type(value).ok_or_else(|| wrong_type(name, expected, value))).transpose()
    }

    /// A truth value.
    ///
    /// # Errors
    /// When it is of another type; so for all below.
    pub fn bool(&self, name: &str) -> Result<Option<bool>, FieldError> {
        self.typed(name, "a boolean", Value::as_bool)
    }

    /// A text.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn str(&self, name: &str) -> Result<Option<&'a str>, FieldError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// An integer.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn integer(&self, name: &str) -> Result<Option<i64>, FieldError> {
        self.typed(name, "an integer", Value::as_i64)
    }

    /// A number within `range`, which `bounds` describes.
    ///
    /// # Errors
    /// When it is of another type or out of range.
    pub fn number(&self, name: &str, bounds: &str, in_range: impl Fn(f64) -> bool) -> Result<Option<f64>, FieldError> {
        let value = self.typed(name, "a number", Value::as_f64)?;
        match value {
            Some(number) if !in_range(number) => Err(FieldError::new(name, format!("must be {bounds}, got {number}"))),
            other => Ok(other),
        }
    }

    /// An integer of at least 1.
    ///
    /// # Errors
    /// When it is of another type or less.
    pub fn positive(&self, name: &str) -> Result<Option<usize>, FieldError> {
        match self.integer(name)? {
            Some(number) if number < 1 => Err(FieldError::new(name, format!("must be at least 1, got {number}"))),
            other => Ok(other.map(|number| usize::try_from(number).unwrap_or(usize::MAX))),
        }
    }

    /// A list.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn array(&self, name: &str) -> Result<Option<&'a Vec<Value>>, FieldError> {
        self.typed(name, "an array", Value::as_array)
    }

    /// An object.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, FieldError> {
        self.typed(name, "an object", Value::as_object).map(|object| object.map(|object| Self { object }))
    }

    /// An object's entries, by their keys.
    ///
    /// # Errors
    /// When it is of another type.
    pub fn entries(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, FieldError> {
        self.typed(name, "an object", Value::as_object)
    }

    /// How many log probabilities are asked for: an integer of at least 0.
    ///
    /// # Errors
    /// When it is of another type or less.
    pub fn logprobs(&self, name: &str) -> Result<Option<usize>, FieldError> {
        let wrong = |number| FieldError::new(name, format!("must be at least 0, got {number}"));
        self.integer(name)?.map(|number| usize::try_from(number).map_err(|_| wrong(number))).transpose()
    }

    /// A list of token ids.
    ///
    /// # Errors
    /// When an element is not an integer that fits.
    pub fn token_ids(&self, name: &str) -> Result<Option<Vec<u32>>, FieldError> {
        self.array(name)?.map(|ids| token_ids(name, ids)).transpose()
    }

    /// Refuses fields that we do not serve, unless they hold one of the values that ask for nothing.
    ///
    /// # Errors
    /// The first such field.
    pub fn refuse_unserved(&self, unserved: &[(&str, &[Value])]) -> Result<(), FieldError> {
        for (name, neutral) in unserved {
            if let Some(value) = self.get(name)
                && !neutral.iter().any(|neutral| same(neutral, value))
            {
                return Err(FieldError::new(*name, format!("{} is not supported by this server", shown(value))));
            }
        }
        Ok(())
    }
}

/// 0 and 0.0 ask for the same.
fn same(a: &Value, b: &Value) -> bool {
    a == b || matches!((a.as_f64(), b.as_f64()), (Some(a), Some(b)) if a == b)
}

pub(super) fn token_ids(param: &str, ids: &[Value]) -> Result<Vec<u32>, FieldError> {
    ids.iter()
        .map(|id| {
            let number = id.as_u64().and_then(|number| u32::try_from(number).ok());
            number.ok_or_else(|| wrong_type(param, "token ids", id))
        })
        .collect()
}

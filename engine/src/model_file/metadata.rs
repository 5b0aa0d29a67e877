//! A model's metadata: typed key-value pairs, by GGUF's keys. Read by the model config, the tokeniser and the chat template.

use std::collections::HashMap;

use super::cursor::Cursor;

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any unsigned integer type.
    Unsigned(u64),
    /// Any signed integer type.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    String(String),
    /// A list of one element type.
    Array(Array),
}

/// A metadata list.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// Texts.
    Strings(Vec<String>),
    /// Integers of any type.
    Integers(Vec<i64>),
    /// f32 or f64.
    Floats(Vec<f64>),
    /// Truth values.
    Bools(Vec<bool>),
}

impl Value {
    /// The type's name, for messages.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a boolean",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
        }
    }

    /// As an unsigned integer.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(*value),
            Self::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// As a float; integers are converted.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(*value),
            Self::Unsigned(value) => Some(*value as f64),
            Self::Signed(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// As a truth value.
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(value) = self { Some(*value) } else { None }
    }

    /// As a text.
    pub fn as_str(&self) -> Option<&str> {
        if let Self::String(value) = self { Some(value) } else { None }
    }

    /// As a list of texts.
    pub fn as_strings(&self) -> Option<&[String]> {
        if let Self::Array(Array::Strings(values)) = self { Some(values) } else { None }
    }

    /// As a list of numbers.
    pub fn as_floats(&self) -> Option<&[f64]> {
        if let Self::Array(Array::Floats(values)) = self { Some(values) } else { None }
    }

    /// As a list of truth values.
    pub fn as_bools(&self) -> Option<&[bool]> {
        if let Self::Array(Array::Bools(values)) = self { Some(values) } else { None }
    }

    /// As a list of integers.
    pub fn as_integers(&self) -> Option<&[i64]> {
        if let Self::Array(Array::Integers(values)) = self { Some(values) } else { None }
    }
}

/// All pairs of a file.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    values: HashMap<String, Value>,
}

impl Metadata {
    pub(super) fn parse(cursor: &mut Cursor<'_>, num_keys: u64) -> Result<Self, String> {
        let mut values = HashMap::new();
        for index in 0..num_keys {
            let key =
                cursor.string("metadata key").map_err(|reason| format!("metadata {index} of {num_keys}: {reason}"))?;
            let type_id = cursor.u32("metadata type")?;
            let value = parse_value(cursor, type_id).map_err(|reason| format!("metadata `{key}`: {reason}"))?;
            values.insert(key.to_owned(), value);
        }
        Ok(Self { values })
    }

    /// Puts a value.
    pub(super) fn set(&mut self, key: &str, value: Value) {
        self.values.insert(key.to_owned(), value);
    }

    /// The value of `key`, if present.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }
}

/// More tokens than any vocabulary has.
const MAX_ARRAY: u64 = 1 << 24;
const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;

fn parse_value(cursor: &mut Cursor<'_>, type_id: u32) -> Result<Value, String> {
    Ok(match type_id {
        0 => Value::Unsigned(cursor.u8("value")?.into()),
        1 => Value::Signed((cursor.u8("value")? as i8).into()),
        2 => Value::Unsigned(cursor.u16("value")?.into()),
        3 => Value::Signed((cursor.u16("value")? as i16).into()),
        4 => Value::Unsigned(cursor.u32("value")?.into()),
        5 => Value::Signed((cursor.u32("value")? as i32).into()),
        6 => Value::Float(f32::from_bits(cursor.u32("value")?).into()),
        7 => match cursor.u8("value")? {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            other => return Err(format!("boolean is {other}")),
        },
        TYPE_STRING => Value::String(cursor.string("string")?.to_owned()),
        TYPE_ARRAY => Value::Array(parse_array(cursor)?),
        10 => Value::Unsigned(cursor.u64("value")?),
        11 => Value::Signed(cursor.u64("value")? as i64),
        12 => Value::Float(f64::from_bits(cursor.u64("value")?)),
        other => return Err(format!("unknown value type {other}")),
    })
}

fn parse_array(cursor: &mut Cursor<'_>) -> Result<Array, String> {
    let type_id = cursor.u32("array type")?;
    if type_id == TYPE_ARRAY {
        return Err("arrays of arrays are not supported".into());
    }
    let min_bytes = if type_id == TYPE_STRING { 8 } else { 1 };
    let len = cursor.count("array length", min_bytes)?;
    if len > MAX_ARRAY {
        return Err(format!("an array of {len} entries: at most {MAX_ARRAY} are read"));
    }
    let mut strings = Vec::new();
    let mut integers = Vec::new();
    let mut floats = Vec::new();
    let mut bools = Vec::new();
    for _ in 0..len {
        match parse_value(cursor, type_id)? {
            Value::String(value) => strings.push(value),
            Value::Unsigned(value) => integers.push(value as i64),
            Value::Signed(value) => integers.push(value),
            Value::Float(value) => floats.push(value),
            Value::Bool(value) => bools.push(value),
            Value::Array(_) => return Err("arrays of arrays are not supported".into()),
        }
    }
    Ok(match type_id {
        TYPE_STRING => Array::Strings(strings),
        6 | 12 => Array::Floats(floats),
        7 => Array::Bools(bools),
        _ => Array::Integers(integers),
    })
}

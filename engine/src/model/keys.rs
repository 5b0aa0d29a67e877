//! Metadata of one architecture: keys behind its name. Read by the architectures' own files.

use crate::model_file::{ModelFile, ModelFileError, Tensor, Value};

/// A file's keys behind an architecture's name.
pub struct Keys<'a> {
    file: &'a ModelFile,
    architecture: &'a str,
}

const LARGEST_SIZE: u64 = 1 << 24;

impl<'a> Keys<'a> {
    /// The keys of `architecture`.
    pub fn new(file: &'a ModelFile, architecture: &'a str) -> Self {
        Self { file, architecture }
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// The error of a key.
    pub fn error(&self, name: &str, reason: String) -> ModelFileError {
        self.file.key_error(&self.key(name), reason)
    }

    /// Whether the file is one of Hugging Face's: heads in halves, norms as they were trained.
    pub fn is_hugging_face(&self) -> bool {
        self.file.tokenizer_json().is_some()
    }

    /// A size: at least 1, and no larger than any model's.
    ///
    /// # Errors
    /// When it is missing or none.
    pub fn size(&self, name: &str) -> Result<usize, ModelFileError> {
        let key = self.key(name);
        let value = self.file.require(&key, "an integer", Value::as_u64)?;
        if value == 0 || value > LARGEST_SIZE {
            return Err(self.file.key_error(&key, format!("is {value}, should be 1 to {LARGEST_SIZE}")));
        }
        Ok(value as usize)
    }

    /// A size that a file need not have.
    ///
    /// # Errors
    /// When it is none.
    pub fn optional_size(&self, name: &str) -> Result<Option<usize>, ModelFileError> {
        if self.file.get(&self.key(name)).is_none() { Ok(None) } else { self.size(name).map(Some) }
    }

    /// A value as it is.
    pub fn value(&self, name: &str) -> Option<&'a Value> {
        self.file.get(&self.key(name))
    }

    /// A window of attention; `None` where there is none, or one of 0 tokens.
    ///
    /// # Errors
    /// When it is no number.
    pub fn window(&self) -> Result<Option<usize>, ModelFileError> {
        let window = self.file.optional(&self.key("attention.sliding_window"), "an integer", Value::as_u64)?;
        Ok(window.filter(|&window| window > 0).map(|window| usize::try_from(window).unwrap_or(usize::MAX)))
    }

    /// A number.
    ///
    /// # Errors
    /// When it is missing or none.
    pub fn number(&self, name: &str) -> Result<f64, ModelFileError> {
        self.file.require(&self.key(name), "a number", Value::as_f64)
    }

    /// A number that a file need not have.
    ///
    /// # Errors
    /// When it is none.
    pub fn optional_number(&self, name: &str) -> Result<Option<f64>, ModelFileError> {
        self.file.optional(&self.key(name), "a number", Value::as_f64)
    }

    /// A soft cap; one of 0 is none. `default` is that of the architecture's GGUF files which do not tell.
    ///
    /// # Errors
    /// When it is no positive number.
    pub fn soft_cap(&self, name: &str, default: Option<f32>) -> Result<Option<f32>, ModelFileError> {
        let Some(cap) = self.optional_number(name)?.map(|cap| cap as f32) else {
            return Ok(default.filter(|_| !self.is_hugging_face()));
        };
        if !(cap.is_finite() && cap >= 0.0) {
            return Err(self.error(name, format!("is {cap}, not a positive number")));
        }
        Ok(Some(cap).filter(|cap| *cap > 0.0))
    }

    /// A text that a file need not have.
    ///
    /// # Errors
    /// When it is none.
    pub fn optional_text(&self, name: &str) -> Result<Option<&'a str>, ModelFileError> {
        self.file.optional(&self.key(name), "a string", Value::as_str)
    }

    /// A truth value a layer, where the file has the list.
    ///
    /// # Errors
    /// When it has another length than there are layers.
    pub fn by_layer(&self, name: &str, num_layers: usize) -> Result<Option<Vec<bool>>, ModelFileError> {
        let key = self.key(name);
        // A number in this place is a period, which is the architecture's to know.
        let Some(list) = self.file.get(&key).and_then(Value::as_bools) else { return Ok(None) };
        if list.len() != num_layers {
            return Err(self.file.key_error(&key, format!("has {} entries for {num_layers} layers", list.len())));
        }
        Ok(Some(list.to_vec()))
    }

    /// Factors of the rotary frequencies: by key, or as a tensor.
    ///
    /// # Errors
    /// When there are not as many as frequencies.
    pub fn factors(&self, name: &str, tensor: &str, len: usize) -> Result<Option<Vec<f64>>, ModelFileError> {
        let key = self.key(name);
        if let Some(factors) = self.file.get(&key).and_then(Value::as_floats) {
            if factors.len() != len {
                return Err(self.file.key_error(&key, format!("has {} factors for {len} frequencies", factors.len())));
            }
            return Ok(Some(factors.to_vec()));
        }
        if !self.file.has_tensor(tensor) {
            return Ok(None);
        }
        let factors: Tensor = self.file.tensor(tensor, 1, len)?;
        Ok(Some(factors.to_f32().into_iter().map(f64::from).collect()))
    }

    /// Rows of the embedding: as many as there are tokens, where the file lists those.
    ///
    /// # Errors
    /// When the file tells neither.
    pub fn vocab_size(&self) -> Result<usize, ModelFileError> {
        let tokens = "tokenizer.ggml.tokens";
        if self.file.get(tokens).is_none() && self.is_hugging_face() {
            return self.size("vocab_size");
        }
        match self.file.require(tokens, "a list of strings", Value::as_strings)?.len() {
            0 => Err(self.file.key_error(tokens, "is empty".into())),
            len => Ok(len),
        }
    }
}

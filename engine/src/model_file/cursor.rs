//! A bounds-checked reader over the header's bytes. Called by the GGUF parser only.

/// Reads little-endian values from the front; every read names what it wanted.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(super) fn position(&self) -> u64 {
        self.position as u64
    }

    pub(super) fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], String> {
        let left = self.bytes.len() - self.position;
        if len > left {
            return Err(format!("{what} needs {len} bytes at offset {}, the file has {left} more", self.position));
        }
        let taken = &self.bytes[self.position..][..len];
        self.position += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }

    pub(super) fn u8(&mut self, what: &str) -> Result<u8, String> {
        self.array::<1>(what).map(|[byte]| byte)
    }

    pub(super) fn u16(&mut self, what: &str) -> Result<u16, String> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of entries of at least `min_bytes` each, refused when the rest of the file cannot hold them.
    pub(super) fn count(&mut self, what: &str, min_bytes: u64) -> Result<u64, String> {
        let count = self.u64(what)?;
        let left = (self.bytes.len() - self.position) as u64;
        if count.checked_mul(min_bytes).is_none_or(|bytes| bytes > left) {
            return Err(format!("{what} is {count}, the file has only {left} more bytes"));
        }
        Ok(count)
    }

    pub(super) fn string(&mut self, what: &str) -> Result<&'a str, String> {
        let len = self.count(what, 1)?;
        let bytes = self.take(len as usize, what)?;
        std::str::from_utf8(bytes).map_err(|error| format!("{what} is not UTF-8: {error}"))
    }
}

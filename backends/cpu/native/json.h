// A small JSON reader (RFC 8259) for the lowered program: a document tree, errors with the place where it went wrong.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ew {

struct Json {
    enum class Type { null, boolean, number, string, array, object };
    Type type = Type::null;
    bool boolean = false;
    double number = 0;
    std::string string;
    std::vector<Json> array;                           // elements, or the values of an object
    std::vector<std::string> keys;                     // of an object, in order

    const Json *find(const char *key) const {
        for (size_t i = 0; i < keys.size(); ++i)
            if (keys[i] == key)
                return &array[i];
        return nullptr;
    }
};

class JsonReader {
  public:
    static Json parse(const std::string &text) {
        JsonReader reader(text);
        Json value = reader.value(0);
        reader.blanks();
        if (reader.at_ != reader.end_)
            reader.fail("text after the document");
        return value;
    }

  private:
    static constexpr int kMaxDepth = 64;
    const char *begin_, *at_, *end_;

    explicit JsonReader(const std::string &text)
        : begin_(text.data()), at_(text.data()), end_(text.data() + text.size()) {}

    [[noreturn]] void fail(const char *what) const {
        throw std::invalid_argument("the program is not valid JSON: " + std::string(what) + " at byte " +
                                    std::to_string(at_ - begin_));
    }
    void blanks() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r'))
            ++at_;
    }
    bool take(char c) {
        blanks();
        if (at_ == end_ || *at_ != c)
            return false;
        ++at_;
        return true;
    }
    void word(const char *expected) {
        const size_t n = std::strlen(expected);
        if (size_t(end_ - at_) < n || std::memcmp(at_, expected, n) != 0)
            fail("unknown word");
        at_ += n;
    }

    Json value(int depth) {
        if (depth > kMaxDepth)
            fail("nested too deeply");
        blanks();
        if (at_ == end_)
            fail("unexpected end");
        Json result;
        switch (*at_) {
        case '{':
            ++at_;
            result.type = Json::Type::object;
            if (take('}'))
                return result;
            do {
                blanks();
                result.keys.push_back(text());
                if (!take(':'))
                    fail("expected ':'");
                result.array.push_back(value(depth + 1));
            } while (take(','));
            if (!take('}'))
                fail("expected ',' or '}'");
            return result;
        case '[':
            ++at_;
            result.type = Json::Type::array;
            if (take(']'))
                return result;
            do
                result.array.push_back(value(depth + 1));
            while (take(','));
            if (!take(']'))
                fail("expected ',' or ']'");
            return result;
        case '"':
            result.type = Json::Type::string;
            result.string = text();
            return result;
        case 't':
            word("true");
            result.type = Json::Type::boolean;
            result.boolean = true;
            return result;
        case 'f':
            word("false");
            result.type = Json::Type::boolean;
            return result;
        case 'n':
            word("null");
            return result;
        default:
            result.type = Json::Type::number;
            result.number = number();
            return result;
        }
    }

    double number() {
        // The literal is copied out: the text need not end in a zero byte. NaN and Infinity are Python's spelling.
        std::string literal;
        while (at_ != end_ && (std::strchr("+-.eE", *at_) ? *at_ != 0 : *at_ >= '0' && *at_ <= '9'))
            literal += *at_++;
        if (literal.empty() || literal == "-") {
            if (at_ != end_ && *at_ == 'I') {
                word("Infinity");
                return literal.empty() ? kInfinity : -kInfinity;
            }
            if (at_ != end_ && *at_ == 'N' && literal.empty()) {
                word("NaN");
                return kInfinity - kInfinity;
            }
            fail("expected a value");
        }
        char *stop = nullptr;
        const double result = std::strtod(literal.c_str(), &stop);
        if (*stop != 0)
            fail("malformed number");
        return result;
    }
    static constexpr double kInfinity = __builtin_huge_val();

    std::string text() {
        if (at_ == end_ || *at_ != '"')
            fail("expected a string");
        ++at_;
        std::string result;
        while (true) {
            if (at_ == end_)
                fail("unterminated string");
            const char c = *at_++;
            if (c == '"')
                return result;
            if (c != '\\') {
                result += c;
                continue;
            }
            if (at_ == end_)
                fail("unterminated string");
            switch (*at_++) {
            case '"': result += '"'; break;
            case '\\': result += '\\'; break;
            case '/': result += '/'; break;
            case 'b': result += '\b'; break;
            case 'f': result += '\f'; break;
            case 'n': result += '\n'; break;
            case 'r': result += '\r'; break;
            case 't': result += '\t'; break;
            case 'u': append_utf8(result, code_point()); break;
            default: fail("unknown escape");
            }
        }
    }

    uint32_t hex4() {
        if (end_ - at_ < 4)
            fail("unterminated escape");
        uint32_t result = 0;
        for (int i = 0; i < 4; ++i) {
            const char c = *at_++;
            const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10
                              : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
            if (digit < 0)
                fail("malformed escape");
            result = result * 16 + uint32_t(digit);
        }
        return result;
    }
    uint32_t code_point() {
        const uint32_t first = hex4();
        if (first < 0xd800 || first > 0xdbff)
            return first;
        if (end_ - at_ < 2 || at_[0] != '\\' || at_[1] != 'u')
            fail("lone surrogate");
        at_ += 2;
        const uint32_t second = hex4();
        if (second < 0xdc00 || second > 0xdfff)
            fail("lone surrogate");
        return 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
    }
    static void append_utf8(std::string &out, uint32_t code) {
        if (code < 0x80) {
            out += char(code);
        } else if (code < 0x800) {
            out += char(0xc0 | code >> 6);
            out += char(0x80 | (code & 0x3f));
        } else if (code < 0x10000) {
            out += char(0xe0 | code >> 12);
            out += char(0x80 | (code >> 6 & 0x3f));
            out += char(0x80 | (code & 0x3f));
        } else {
            out += char(0xf0 | code >> 18);
            out += char(0x80 | (code >> 12 & 0x3f));
            out += char(0x80 | (code >> 6 & 0x3f));
            out += char(0x80 | (code & 0x3f));
        }
    }
};

} // namespace ew
